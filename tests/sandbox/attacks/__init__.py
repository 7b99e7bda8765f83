"""Attacks on sandboxes: programs as data, what they are after, and how the host judges them.

None of them is ever to run outside a sandbox.
"""

from .between_turns import BETWEEN_TURNS
from .channel import CHANNEL
from .files import FILES
from .host_resources import HOST_RESOURCES
from .kernel import KERNEL
from .leftovers import LEFTOVERS
from .memory import MEMORY
from .model import Attack, Finding, Verdict
from .network import NETWORK
from .output_time import OUTPUT, TIME
from .processes import PROCESSES
from .secrets_privilege import PRIVILEGE, SECRETS
from .stage import Stage, staged
from .trial import Trial
from .worker import WORKER

ATTACKS: tuple[Attack, ...] = (
    *FILES,
    *NETWORK,
    *PROCESSES,
    *WORKER,
    *MEMORY,
    *OUTPUT,
    *TIME,
    *KERNEL,
    *HOST_RESOURCES,
    *CHANNEL,
    *BETWEEN_TURNS,
    *SECRETS,
    *LEFTOVERS,
    *PRIVILEGE,
)

__all__ = ["ATTACKS", "Attack", "Finding", "Stage", "Trial", "Verdict", "staged"]
