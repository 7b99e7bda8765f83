"""mini-swe-agent with its own configuration, one command in a shell."""

import os
from pathlib import Path

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())
settings = {name: value for name, value in config["model"].items() if name != "model_kwargs"}
model = LitellmModel(
    model_name=f"openai/{os.environ['OPENAI_MODEL']}",
    model_kwargs={**config["model"]["model_kwargs"], "api_base": os.environ["OPENAI_BASE_URL"]},
    cost_tracking="ignore_errors",
    **settings,
)
templates = {name: config["agent"][name] for name in ("system_template", "instance_template")}
agent = DefaultAgent(model, LocalEnvironment(), **templates, step_limit=5, cost_limit=0)
result = agent.run("Say hello.")
print(result["exit_status"])
