"""Wherever rollgym is installed, nothing of it can be read inside: reference solutions lie in its files."""

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attack_table import ROOT, as_user

from rollgym.sandbox.docker_image import write_tar
from rollgym.sandbox.hidden import hidden, inside, split

VERSION = f"python{sys.version_info[0]}.{sys.version_info[1]}"
SKIPPED = shutil.ignore_patterns(
    *("test", "tests", "site-packages", "dist-packages", "idlelib", "tkinter", "ensurepip", "config-*"),
    *("__pycache__", "lib2to3", "turtledemo", "pydoc_data", "distutils"),
)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "web", "*.html", "*.svg")

LOOK = """
import importlib, os, re, sys
name, found = "roll" + "gym", []
mark = re.compile(rb"Writes the reference sol[u]tion from what")
def look(path):
    try:
        with open(path, "rb") as file:
            if file.read(1): found.append(path)
    except OSError: pass
for top in {tops}:
    for folder, folders, files in os.walk(top, followlinks=False):
        for file in files:
            path = os.path.join(folder, file)
            if name in path: look(path)
places = sys.path + [os.path.join(top, p) for top in {tops} for p in (
    "", "lib/{version}/site-packages", "local/lib/{version}/dist-packages",
    "lib/extra", "lib/extra.zip", "share/source")]
for place in places:
    sys.path.insert(0, place)
    importlib.invalidate_caches()
    for module in ("envs.code.expert", "envs.code.families.base", "sandbox.worker", "types"):
        try: found.append(importlib.import_module(name + "." + module).__file__)
        except Exception: pass
    sys.path.remove(place)
found += [m for m in sys.modules if name in m and getattr(sys.modules[m], "__file__", None)]
found += [k for k, v in os.environ.items() if name in v.replace(name + "-sandbox-", "")]
for number in range(3, 256):
    try: found += [l for l in [os.readlink(f"/proc/self/fd/{number}")] if name in l]
    except OSError: pass
try:
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
        for line in maps:
            start, end = (int(n, 16) for n in line.split()[0].split("-"))
            if "r" not in line.split()[1] or "[v" in line: continue
            try:
                memory.seek(start)
                if mark.search(memory.read(end - start)): found.append("memory")
            except (OSError, ValueError, OverflowError): continue
except OSError: pass
print("FOUND", sorted(set(map(str, found)))[:5])
""".replace("{version}", VERSION)
"""Looks for files, modules, variables, descriptors and memory of rollgym; says what it found."""

DRIVER = """
import json, sys
import rollgym
from rollgym.core.errors import RollgymError
from rollgym.sandbox.factory import open_sandbox
from rollgym.sandbox.types import Level, Limits, SandboxSettings
found = {"at": rollgym.__file__}
for backend in ("namespaces", "landlock"):
    for preload in ((), ("decimal",)):
        settings = SandboxSettings(
            backend=backend, minimum=Level.NONE, preload=preload, limits=Limits(seconds=60, memory_mb=1024)
        )
        try:
            sandbox = open_sandbox(settings)
        except RollgymError as error:
            found[f"{backend} {len(preload)}"] = f"MISSING {error}"
            continue
        for how in (sandbox.exec, sandbox.run):
            ran = how(sys.argv[1])
            found[f"{backend} {len(preload)} {how.__name__}"] = ran.stdout + ran.stderr
        found[f"{backend} {len(preload)} python"] = sandbox.python
        sandbox.close()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user may read, and that no sandbox has its own of."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def wheel(place: Path) -> Path:
    """rollgym as pip installs it: package and metadata, without links."""
    target = place / "installed"
    for part in ("rollgym",):
        shutil.copytree(ROOT / part, target / part, ignore=LEFT_OUT)
    info = target / "rollgym-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rollgym\nVersion: 0\n")
    (info / "RECORD").write_text("rollgym/envs/code/expert.py,,\n")
    return target


def said_by(python: Path | str, code: str) -> str:
    ran = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/")
    return ran.stdout.strip()


@pytest.fixture(scope="module")
def prefix(place: Path) -> Path:
    """A Python in a prefix of its own: program and standard library of one that every user may start."""
    same = "import sys; print(*sys.version_info[:2], sep='.')"
    system = "/usr/bin/python3"
    base = system if f"python{said_by(system, same)}" == VERSION else os.path.realpath(sys.executable)
    made = place / "prefix"
    (made / "bin").mkdir(parents=True)
    shutil.copy(os.path.realpath(base), made / "bin" / "python3")
    library = said_by(base, "import sysconfig; print(sysconfig.get_path('stdlib'))")
    shutil.copytree(library, made / "lib" / VERSION, ignore=SKIPPED, symlinks=False)
    if said_by(made / "bin/python3", "import sys; print(sys.prefix)") != str(made):
        pytest.skip(f"{base} cannot be copied to another prefix")
    return made


def packages_of(prefix: Path) -> Path:
    """The first folder of packages of a Python; Debian's has another name."""
    return Path(said_by(prefix / "bin/python3", "import site; print(site.getsitepackages()[0])"))


def in_prefix(prefix: Path, wheel: Path) -> tuple[Path, list[str]]:
    shutil.copytree(wheel, packages_of(prefix), dirs_exist_ok=True)
    return prefix / "bin/python3", []


def in_venv(prefix: Path, wheel: Path) -> tuple[Path, list[str]]:
    venv = prefix.parent / "venv"
    subprocess.run([prefix / "bin/python3", "-m", "venv", "--without-pip", venv], check=True)
    shutil.copytree(wheel, venv / "lib" / VERSION / "site-packages", dirs_exist_ok=True)
    return venv / "bin/python3", []


def as_source(prefix: Path, wheel: Path) -> tuple[Path, list[str]]:
    """An editable install whose tree, links and all, lies inside the prefix."""
    source = prefix / "share" / "source"
    source.mkdir(parents=True)
    for part in ("envs", "agents", "trainer"):
        shutil.copytree(wheel / "rollgym" / part, source / part)
    shutil.copytree(
        wheel / "rollgym", source / "rollgym", ignore=shutil.ignore_patterns("envs", "agents", "trainer")
    )
    for part in ("envs", "agents", "trainer"):
        (source / "rollgym" / part).symlink_to(f"../{part}")
    (source / "pyproject.toml").write_text("[project]\nname = 'rollgym'\n")
    site = packages_of(prefix)
    site.mkdir(parents=True)
    (site / "__editable__.rollgym-0.pth").write_text(f"{source}\n")
    return prefix / "bin/python3", []


def in_target(prefix: Path, wheel: Path) -> tuple[Path, list[str]]:
    shutil.copytree(wheel, prefix / "lib" / "extra")
    return prefix / "bin/python3", [str(prefix / "lib" / "extra")]


def in_zip(prefix: Path, wheel: Path) -> tuple[Path, list[str]]:
    name = prefix / "lib" / "extra.zip"
    with zipfile.ZipFile(name, "w") as file:
        for path in sorted(wheel.rglob("*")):
            file.write(path, path.relative_to(wheel))
    return prefix / "bin/python3", [str(name)]


def in_user_site(prefix: Path, wheel: Path) -> tuple[Path, list[str]]:
    shutil.copytree(wheel, prefix / "user" / "lib" / VERSION / "site-packages")
    return prefix / "bin/python3", []


LAYOUTS: list[Callable[[Path, Path], tuple[Path, list[str]]]] = [
    in_prefix,
    in_venv,
    as_source,
    in_target,
    in_zip,
    in_user_site,
]
QUICK = (in_prefix, in_venv)


@pytest.mark.parametrize(
    "layout",
    [pytest.param(one, marks=[] if one in QUICK else [pytest.mark.slow], id=one.__name__) for one in LAYOUTS],
)
def test_nothing_of_rollgym_can_be_read_inside(
    place: Path, prefix: Path, wheel: Path, layout: Callable[[Path, Path], tuple[Path, list[str]]]
) -> None:
    mine = place / layout.__name__ / "prefix"
    shutil.copytree(prefix, mine, symlinks=True, copy_function=os.link)
    python, path = layout(mine, wheel)
    # What rollgym needs itself; links to it are not followed from there.
    packages = sysconfig.get_path("purelib")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, packages]),
        "PYTHONUSERBASE": str(mine / "user"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    env.pop("PYTHONHOME", None)
    tops = [str(mine), str(mine.parent / "venv"), "/usr/lib/python3", "/usr/local"]
    look = LOOK.replace("{tops}", repr(tops))
    users: list[dict[str, object]] = [{"env": env, "cwd": "/"}]
    if os.getuid() == 0:
        users.append({**as_user(), "env": {**env, "HOME": "/nonexistent"}})
    for user in users:
        ran = subprocess.run([python, "-B", "-c", DRIVER, look], capture_output=True, text=True, **user)  # type: ignore[call-overload]
        assert ran.returncode == 0, (user, ran.stderr[-2000:])
        found = json.loads(ran.stdout)
        assert found.pop("at").startswith(str(place)), "rollgym was not where this test put it"
        assert not [text for text in found.values() if "can be read inside" in text]
        pythons = [found.pop(name) for name in list(found) if name.endswith("python")]
        if not pythons:
            pytest.skip(f"no sandbox works here: {found}")
        assert all(said.startswith("the Python of this process") for said in pythons), pythons
        said = {name: text.strip() for name, text in found.items() if not text.startswith("MISSING")}
        assert said == dict.fromkeys(said, "FOUND []")


def test_without_hiding_the_look_finds_it(wheel: Path) -> None:
    """Else the test above would show nothing."""
    look = LOOK.replace("{tops}", repr([str(wheel)]))
    ran = subprocess.run([sys.executable, "-I", "-S", "-c", look], capture_output=True, text=True)
    assert "rollgym/" in ran.stdout


@pytest.mark.parametrize("backend", ["namespaces", "landlock"])
def test_a_module_that_imports_rollgym_cannot_be_preloaded(
    open_or_skip: Callable[..., object], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the worker has in memory, each execution would inherit."""
    from rollgym.sandbox.types import SandboxSettings

    with pytest.raises(pytest.skip.Exception, match="rollgym cannot be imported in a sandbox"):
        open_or_skip(backend, SandboxSettings(preload=("rollgym.core.types",)))


def test_an_image_has_nothing_of_rollgym(prefix: Path, wheel: Path, place: Path) -> None:
    mine = place / "image" / "prefix"
    shutil.copytree(prefix, mine, symlinks=True, copy_function=os.link)
    for folder in ("", "site-packages"):
        shutil.copytree(wheel, mine / "lib" / VERSION / folder, dirs_exist_ok=True)
    file = io.BytesIO()
    write_tar(file, str(mine / "bin/python3"))
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        names = tar.getnames()
    assert any(name.endswith(f"{VERSION}/os.py") for name in names)
    assert [name for name in names if "rollgym" in name.lower()] == []


def test_hidden_folders_are_found_whatever_holds_them(tmp_path: Path) -> None:
    site = tmp_path / "lib/python3.12/site-packages"
    other = tmp_path / "envs/two/lib/python3.9/site-packages/rollgym"
    for folder in (
        site / "rollgym/envs",
        site / "rollgym-1.0.dist-info",
        site / "numpy",
        other,
        tmp_path / "lib/x",
    ):
        folder.mkdir(parents=True)
    (site / "__editable__.rollgym-1.0.pth").write_text("x")
    (site / "__editable___rollgym_1_0_finder.py").write_text("x")
    whole = hidden([str(tmp_path)], packages=False)
    assert whole == (str(tmp_path / "envs"), str(site))
    parts = hidden([str(tmp_path)], packages=True)
    names = ["__editable__.rollgym-1.0.pth", "__editable___rollgym_1_0_finder.py", "rollgym"]
    assert parts == (
        str(tmp_path / "envs"),
        *(str(site / name) for name in (*names, "rollgym-1.0.dist-info")),
    )
    needed = hidden([str(tmp_path)], packages=False, needed=[str(other)])
    assert not any(str(other).startswith(path) for path in needed)
    read, listed = split([str(tmp_path)], whole)
    assert str(tmp_path / "lib/x") in read
    assert str(tmp_path) in listed
    assert not any(path.startswith(str(site)) for path in (*read, *listed))
    link = tmp_path.parent / f"{tmp_path.name}-link"
    link.symlink_to(tmp_path)
    assert inside(whole, [str(link)]) == (f"{link}/envs", f"{link}/lib/python3.12/site-packages")
