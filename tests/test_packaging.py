"""What a user installs, and what happens on import on a machine that lacks half of it (PKG-1)."""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).parents[1]
KERNEL_MODULES = sorted(p.stem for p in (REPO / "kernels" / "berrylm_kernels").glob("*.py") if p.stem != "__init__")
EXTRAS_MODULES = (
    *("fastapi", "uvicorn", "sse_starlette", "prometheus_client"),
    *("jupyterlab", "ipykernel", "IPython", "matplotlib", "nbval"),
    *("fla", "transformers", "einops"),
)
# Where the module that is imported is not called as the distribution that brings it.
DISTRIBUTION = {
    "fla": "flash-linear-attention",
    "yaml": "pyyaml",
    "sse_starlette": "sse-starlette",
    "prometheus_client": "prometheus-client",
}


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def run_python(code, cwd, *, absent=(), env=None):
    """Run `code` in a fresh interpreter without a GPU, in which the packages `absent` are not installed."""
    hide = f"""
        import sys
        from importlib.machinery import PathFinder

        class Without(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.partition(".")[0] in {tuple(absent)!r} else super().find_spec(name, path, target)

        sys.meta_path[sys.meta_path.index(PathFinder)] = Without
    """
    clean = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONPATH")}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(hide) + textwrap.dedent(code)],
        cwd=cwd,
        env=clean | {"CUDA_VISIBLE_DEVICES": ""} | (env or {}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{code}\n{result.stdout}\n{result.stderr}"
    return result.stdout.strip()


def test_import_loads_nothing_heavy(tmp_path):
    """PKG-1: `import berrylm_ref`, and its public names, cost torch and no more, though all the rest is installed."""
    loaded = run_python(
        f"""
        from berrylm_ref import LLM, BerryLM, BerryLMConfig, SamplingParams
        heavy = ("triton", "berrylm_kernels", "pytest", *{EXTRAS_MODULES!r})
        print(sorted(set(heavy) & {{name.partition(".")[0] for name in sys.modules}}))
        """,
        tmp_path,
    )
    assert loaded == "[]"


def test_plain_path_runs_without_triton_or_gpu(tmp_path, golden):
    """PKG-1: triton absent, no GPU: the import works, and the plain torch path gives the official first token."""
    folder = golden / "hf-odd"
    printed = run_python(
        f"""
        from safetensors.torch import load_file
        from berrylm_ref import BerryLM
        model = BerryLM.from_pretrained({str(folder)!r})
        recorded = load_file({str(folder / "golden.safetensors")!r})
        logits = model(recorded["greedy_prompt_ids"])
        print(logits[0, -1].argmax().item() == recorded["greedy_ids"][0, 0].item(), "triton" in sys.modules)
        """,
        tmp_path,
        absent=("triton", *EXTRAS_MODULES),
    )
    assert printed == "True False"


def test_asking_for_triton_without_triton_is_refused_clearly(tmp_path, golden):
    """PKG-1: no fallback in silence: backend="triton" without triton is a ValueError that says what is missing."""
    printed = run_python(
        f"""
        from berrylm_ref import BerryLM
        try:
            BerryLM.from_pretrained({str(golden / "hf-odd")!r}, backend="triton")
        except ValueError as error:
            print(error)
        """,
        tmp_path,
        absent=("triton",),
    )
    assert re.search(r"triton.*(install|import)", printed, re.DOTALL), printed or "nothing was refused"


@pytest.mark.parametrize("module", KERNEL_MODULES)
def test_kernel_module_imports_without_a_driver(tmp_path, module):
    """PKG-1: an autotune decorator that asks for the driver when its module loads fails with "0 active drivers"."""
    run_python(f"import berrylm_kernels.{module}", tmp_path)


def test_command_starts_on_a_base_install(tmp_path):
    """PKG-1: the extras are extras: without them, and without triton, `berrylm --help` still works."""
    printed = run_python(
        """
        from berrylm_ref.cli import main
        sys.argv = ["berrylm", "--help"]
        main()
        """,
        tmp_path,
        absent=("triton", *EXTRAS_MODULES),
    )
    missing = [c for c in ("generate", "serve") if c not in printed]
    assert not missing, f"no command {missing} in:\n{printed}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    result = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_only_our_top_level_names(wheel):
    """PKG-1: a wheel that installs `tests` or `benchmarks` writes over other people's."""
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    metadata = {top for top in tops if top.endswith(".dist-info")}
    assert len(metadata) == 1
    assert tops - metadata == {"berrylm_ref", "berrylm_kernels"}


def test_wheel_holds_every_file_of_the_packages(wheel):
    """A checkpoint or a template that an ignore rule keeps out of the wheel is missed only by those who install it."""
    names = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith(("berrylm_ref/", "berrylm_kernels/"))}
    expected = set()
    for folder in (REPO / "berrylm_ref", REPO / "kernels" / "berrylm_kernels"):
        files = [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        expected |= {p.relative_to(folder.parent).as_posix() for p in files}
    assert names == expected


def test_wheel_holds_the_checkpoint_that_commands_default_to(wheel):
    """Weights that stay behind leave every command of an installed package without a model."""
    archive, folder = zipfile.ZipFile(wheel), "berrylm_ref/checkpoints/nano/"
    names = {name.removeprefix(folder) for name in archive.namelist() if name.startswith(folder)}
    assert names >= {"config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json", "training_log.json"}
    shards = set(json.loads(archive.read(folder + "model.safetensors.index.json"))["weight_map"].values())
    assert shards and shards <= names


def test_wheel_lives_next_to_another_tests_package(wheel, tmp_path):
    """PKG-1: installed beside a project that has a `tests` folder, each still finds its own."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (site / "tests").mkdir()
    (site / "tests" / "__init__.py").write_text("OWNER = 'somebody else'\n", encoding="utf-8")
    printed = run_python(
        "import berrylm_ref, tests; print(berrylm_ref.__file__, tests.OWNER, sep=chr(10))",
        tmp_path,
        env={"PYTHONPATH": str(site)},
    )
    assert printed.splitlines() == [str(site / "berrylm_ref" / "__init__.py"), "somebody else"]


def test_no_folder_of_ours_shadows_a_generic_name():
    """PKG-1: an editable install puts the repository on the path; without __init__.py, `kernels` and `tests` lose
    to an installed package of that name."""
    assert not [f for f in ("kernels", "tests", "notebooks") if (REPO / f / "__init__.py").exists()]


def test_conda_environment_is_in_step(project):
    """environment.yml brings Python and pip only; versions and packages have one home, pyproject.toml."""
    environment = yaml.safe_load((REPO / "environment.yml").read_text(encoding="utf-8"))
    assert environment["name"] == project["name"]
    assert environment["dependencies"] == [
        f"python{project['requires-python']}",
        "pip",
        {"pip": ["-e .[dev]"]},
    ]
    assert "dev" in project["optional-dependencies"]


def test_dev_holds_all_extras(project):
    """Whoever installs dev can run every test and notebook: a new extra that dev forgets breaks a fresh clone.

    But for scale, which changes what the server runs on; its tests have an environment of their own."""
    extras = project["optional-dependencies"]
    (self_reference,) = [line for line in extras["dev"] if line.startswith(project["name"])]
    held = re.fullmatch(rf"{project['name']}\[(.+)\]", self_reference)[1].split(",")
    assert sorted(held) == sorted(set(extras) - {"dev", "scale"})


def test_torch_has_an_upper_bound(project):
    """Without one, pip takes the newest release, which nobody has run the tests with."""
    (torch,) = [line for line in project["dependencies"] if line.startswith("torch")]
    assert re.search(r">=\d+\.\d+,<\d+\.\d+$", torch), torch


def test_every_import_is_declared(project):
    """A package that arrives only because something else needs it is gone after that one's next release."""
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.match(r"[A-Za-z0-9-]+", line)[0].lower() for line in lines}
    undeclared = {}
    for folder in ("berrylm_ref", "kernels", "tests"):
        local = {p.stem for p in (REPO / folder).rglob("*")} if folder != "berrylm_ref" else set()
        for path in (REPO / folder).rglob("*.py"):
            for name in imported_names(path) - local - {"berrylm_ref", "berrylm_kernels"} - sys.stdlib_module_names:
                if DISTRIBUTION.get(name, name) not in declared:
                    undeclared.setdefault(name, []).append(str(path.relative_to(REPO)))
    assert not undeclared


def imported_names(path):
    """The top-level names of the absolute imports of a file."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.partition(".")[0] for name in plain | froms}


def test_make_refuses_an_old_python_before_it_builds_anything(tmp_path):
    """On an old Python, pip would fail minutes later with a page of resolver output."""
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_bytes((REPO / name).read_bytes())
    old = tmp_path / "old-python"
    pretend = "import sys; sys.version, sys.version_info = '3.10.4', (3, 10, 4); exec(sys.argv[2])"
    old.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{pretend}" "$@"\n', encoding="utf-8")
    old.chmod(0o755)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    result = subprocess.run(
        ["make", f"PYTHON={old}", "lint"], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60
    )
    assert result.returncode != 0
    assert "needs Python 3.11 or newer" in result.stderr and "3.10.4" in result.stderr
    assert not (tmp_path / ".venv").exists()
