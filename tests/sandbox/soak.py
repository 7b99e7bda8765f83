"""Many executions of every kind in one sandbox, which must not show."""

from rollgym.sandbox.client import WorkerSandbox

PROGRAMS = (
    "print(sum(range(100)))",
    "open('a', 'w').write('x'); import os; os.makedirs('b/c')",
    "import os\nif not os.fork():\n  os.setsid()\n  while True: pass",
    "1 / 0",
    "import tempfile; tempfile.mkdtemp()",
)


def soak(sandbox: WorkerSandbox, times: int) -> None:
    """Run programs that compute, write, leave processes and files behind, and fail; some in the session."""
    for turn in range(times):
        action = sandbox.run if turn % 7 == 6 else sandbox.exec
        action(PROGRAMS[turn % len(PROGRAMS)])
        if turn % 50 == 49:
            sandbox.reset()
    ran = sandbox.exec("import os; print(os.listdir('.'), os.listdir(os.environ.get('TMPDIR', '/tmp')))")
    assert ran.stdout == "[] []\n"
    sandbox.reset()
