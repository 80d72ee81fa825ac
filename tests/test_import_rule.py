"""The import rule: strictly downward, no circles, and one door to the kernels.

Every import counts, also one inside a function or under TYPE_CHECKING: hiding an upward import does not make it
downward.
"""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]

# Lowest first. A file imports from the groups before its own and, inside its group, from the names left of it.
GROUPS = (
    ("config", "ops", "tokenizer", "shipped"),
    ("shadow", "backend", "allreduce", "sharding", "weights"),
    ("cache",),
    ("merged", "layers", "model", "random_weights"),
    ("engine",),
    ("chat", "server"),
    ("parity", "training"),
    ("bench",),
    ("commands", "cli", "demo"),
)
RANK = {name: rank for rank, name in enumerate(name for group in GROUPS for name in group)}
PROGRAMS = ("cli", "demo")  # these use the package as a user does, so they may import its root
KERNELS_DOOR = "backend"


def modules_under(folder):
    """{dotted module name: path} of the Python files of the package in `folder`."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(module, source, is_package, modules):
    """The absolute dotted names that `source` imports; `from a import b` names a.b where that is a module."""
    package = module if is_package else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                names.add(full if full in modules else base)
    return names


def component(module):
    """config for berrylm_ref.config, cache for berrylm_ref.cache.pool, "" for berrylm_ref itself."""
    return module.partition(".")[2].partition(".")[0]


def breach(module, imported):
    """Why `module` must not import `imported`, or None."""
    root, target_root = module.partition(".")[0], imported.partition(".")[0]
    if root == "berrylm_kernels":
        return "the kernels import nothing of berrylm_ref" if target_root == "berrylm_ref" else None
    source, target = component(module), component(imported)
    if target_root == "berrylm_kernels" and not source.startswith(KERNELS_DOOR):
        return f"only {KERNELS_DOOR} imports the kernels"
    if target_root != "berrylm_ref" or source in ("", target):
        return None
    if target == "":
        return None if source in PROGRAMS else "the package root stands above all of its modules"
    source, target = rank_name(source), rank_name(target)
    return None if RANK[target] < RANK[source] else f"{target} does not stand below {source}"


def rank_name(name):
    """backend_triton.py, if backend.py grows too long, keeps backend's place."""
    stem = KERNELS_DOOR if name.startswith(KERNELS_DOOR) else name
    assert stem in RANK, f"berrylm_ref.{name} has no place in the import rule: give it one in GROUPS"
    return stem


@pytest.fixture(scope="module")
def imports():
    """{module: its imports} of both packages."""
    modules = modules_under(REPO / "berrylm_ref") | modules_under(REPO / "kernels" / "berrylm_kernels")
    assert "berrylm_ref" in modules, "found no package: the walk is broken"
    return {
        name: imports_of(name, path.read_text(encoding="utf-8"), path.name == "__init__.py", modules)
        for name, path in modules.items()
    }


def test_imports_point_strictly_downward(imports):
    """An engine that the model imports back can be neither read nor tested on its own."""
    for name in imports:
        if name.startswith("berrylm_ref."):
            rank_name(component(name))
    breaches = [
        f"{name} imports {imported}: {why}"
        for name, targets in imports.items()
        for imported in sorted(targets)
        if (why := breach(name, imported))
    ]
    assert not breaches, "\n".join(breaches)


def test_no_import_circles(imports):
    """A circle works until somebody imports its modules in the other order."""
    graph = {name: {t for t in targets if t in imports and t != name} for name, targets in imports.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import circle: " + " <- ".join(error.args[1]))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("berrylm_ref.model", "from berrylm_ref.engine import LLM"),
        ("berrylm_ref.model", "from .engine.request import Request"),
        ("berrylm_ref.cache.pool", "from ..model import BerryLM"),
        ("berrylm_ref.cache.pool", "from .. import model"),
        ("berrylm_ref.ops.kda", "def f():\n    import berrylm_ref.backend"),
        ("berrylm_ref.ops.kda", "import berrylm_kernels.kda"),
        ("berrylm_ref.model", "from berrylm_kernels import kda"),
        ("berrylm_ref.engine.engine", "from berrylm_ref import BerryLM"),
        ("berrylm_kernels.kda", "from berrylm_ref.ops.kda import recurrent_kda"),
    ],
)
def test_the_rule_sees_a_breach(module, source):
    """Each way to write a forbidden import is found: a check that overlooks one spelling invites it."""
    modules = {"berrylm_ref.model", "berrylm_ref.engine", "berrylm_kernels.kda"}
    assert any(breach(module, imported) for imported in imports_of(module, source, False, modules))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("berrylm_ref.engine.engine", "from ..model import BerryLM\nfrom .request import Request"),
        ("berrylm_ref.backend", "import berrylm_kernels.kda"),
        ("berrylm_ref.server.app", "from berrylm_ref.chat import ToolCallParser"),
        ("berrylm_ref.demo", "from berrylm_ref import LLM"),
        ("berrylm_ref", "from .engine import LLM"),
        ("berrylm_kernels.kda", "import triton\nfrom .conv import conv"),
    ],
)
def test_the_rule_lets_a_proper_import_pass(module, source):
    assert not [i for i in imports_of(module, source, module == "berrylm_ref", {}) if breach(module, i)]


@pytest.mark.parametrize(("folder", "limit"), [("berrylm_ref", 300), ("kernels/berrylm_kernels", 400)])
def test_a_long_file_is_two_files(folder, limit):
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (REPO / folder).rglob("*.py")}
    long = {str(path.relative_to(REPO)): n for path, n in lengths.items() if n > limit}
    assert not long, f"over {limit} lines: {long}"
