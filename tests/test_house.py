"""Rules of the house: who may touch the disk or import whom, how long a function is, one name for one thing.

Each rule finds its offences in the syntax trees of the three packages. What it allows stands beside it, with
the reason; an allowance that is no longer needed fails, too.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cpomdp_ppl", "solvers", "baselines")

LINES_OF_A_FUNCTION = 60

# ----------------------------------------------------------------------------- modules and their trees


@cache
def sources() -> dict[str, str]:
    """Source by the name of each module, such as `cpomdp_ppl.inference` or `solvers.cids.learner`."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


@cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(source) for module, source in sources().items()}


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods by their qualified names; those inside other functions belong to these."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an expression, with `*` for what is not a name: `Path(x).open` is `*.open`."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "*"


class _Imports(ast.NodeVisitor):
    """Modules that a module imports, at its top or inside its functions, but not under TYPE_CHECKING."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        branches = node.orelse if dotted(node.test).endswith("TYPE_CHECKING") else [node]
        for branch in branches:
            self.generic_visit(branch) if branch is node else self.visit(branch)

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [alias.name for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute here"
        assert node.module is not None
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            self.found.append(inner if inner in sources() else f"{node.module}:{alias.name}")


@cache
def imports(module: str) -> tuple[str, ...]:
    """What a module imports: `package.module`, or `package.module:name` for a name inside one."""
    visitor = _Imports()
    visitor.visit(trees()[module])
    return tuple(visitor.found)


# ------------------------------------------------------------------------------------------- the rules

MAY_TOUCH_THE_DISK = {
    "cpomdp_ppl.experiments": "run folders, sweeps and how files are written",
    "cpomdp_ppl.cli": "commands",
    "cpomdp_ppl.report": "pages",
    "cpomdp_ppl.episodes_file": "Episodes.save and Episodes.load",
    "cpomdp_ppl.native.cache": "compiled libraries that are kept",
    "cpomdp_ppl.native.compiler": "what the C compiler reads and writes",
    "solvers.cids.solution": "solutions that are saved",
    "cpomdp_ppl.native.prelude": "C texts that come with the package",
    "solvers.cids.group": "in memory: what processes send each other",
}

DISK = re.compile(
    r"(?!self\.\w+$)(open|.+\.(open|read_text|read_bytes|write_text|write_bytes|mkdir|unlink|touch|rmdir|rename)"
    r"|.+\.(savefig|to_netcdf)|torch\.(save|load)|(np|numpy)\.(save\w*|load\w*|fromfile|memmap)"
    r"|(json|pickle)\.(dump|load)|os\.(replace|remove|makedirs|mkdir|unlink|rename|link|fsync)"
    r"|(shutil|tempfile)\..*)"
)


@cache
def touched() -> dict[str, set[str]]:
    """Calls that read or write files, by module."""
    found = defaultdict(set)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and DISK.fullmatch(name := dotted(node.func)):
                found[module].add(name)
    return found


def disk() -> Iterator[str]:
    """Calls that read or write files, in modules that should not."""
    for module, calls in touched().items():
        if not module.startswith(tuple(MAY_TOUCH_THE_DISK)):
            yield from (f"{module}: {call}" for call in calls)


ALGORITHM = ("learner", "objective", "estimator", "policy", "priors", "schedules")
OPERATIONS = re.compile(r"(?<![a-z])(rank|shard|file|signal)s?(?![a-z])", re.IGNORECASE)
OPERATING = re.compile(
    r"(os|pathlib|signal|threading|multiprocessing|torch\.distributed|cpomdp_ppl\.experiments"
    r"|solvers\.cids\.(group|training|solution))\b.*"
)


def algorithm() -> Iterator[str]:
    """Words of operations in the modules of the C-IDS algorithm, in code or prose, and imports of them."""
    for name in ALGORITHM:
        module = f"solvers.cids.{name}"
        for word in OPERATIONS.findall(sources()[module]):
            yield f"{module}: {word.lower()}"
        yield from (f"{module} -> {target}" for target in imports(module) if OPERATING.fullmatch(target))


# What others may build on: the interface of backends and beliefs, the pass, what is observed, drawn or known,
# the choice of a backend, and arithmetic (Gaussians, double precision). How each backend does its work is its
# affair.
PUBLIC_INFERENCE = {
    "backend",
    "belief",
    "choice",
    "filtering",
    "gaussian_belief",
    "knowledge",
    "observed",
    "persistence",
    "precision",
    "scan",
}
EXTENDS_INFERENCE = {
    "cpomdp_ppl.learning.differentiable": "overrides steps of recursions by ones that gradients pass through",
    "solvers.exact.tables": "enumerates programs as the exact filter does, and all that may be observed",
    "cpomdp_ppl.learning.fisher": "is a particle filter that carries scores along",
}


def outside(module: str) -> bool:
    """Whether a module neither belongs to the inference package nor extends it."""
    return not module.startswith("cpomdp_ppl.inference") and module not in EXTENDS_INFERENCE


def inference() -> Iterator[str]:
    """Imports from inside the inference package by those outside it."""
    for module in filter(outside, trees()):
        for target in imports(module):
            where, _, name = target.partition(":")
            inner = where.removeprefix("cpomdp_ppl.inference.")
            if (inner != where and inner not in PUBLIC_INFERENCE) or (
                where.startswith("cpomdp_ppl.inference") and name.startswith("_")
            ):
                yield f"{module}: {target}"


LAYERS = (
    ("language", "errors arrays actions state rng progress handlers signature dataflow model check"),
    ("experiments", "experiments sweep"),
    ("native", "native"),
    ("playing", "prior recorded_arrays episodes episodes_file policy rollout generative encoding"),
    ("inference", "inference"),
    ("judging", "context evaluation bounds agent ongoing gym"),
    ("learning and diagnostics", "learning diagnostics"),
    ("models", "models"),
    ("report", "report"),
    ("command line", "cli __main__"),
)
LAYER = {f"cpomdp_ppl.{room}": i for i, (_, rooms) in enumerate(LAYERS) for room in rooms.split()}
MAY_REACH_UP = {
    "cpomdp_ppl.model -> cpomdp_ppl.rollout": "a model, called as a Pyro program, is one episode of itself",
}


def room(module: str) -> str:
    """`cpomdp_ppl.X` of a module of cpomdp_ppl; the package itself gathers public names, and has no layer."""
    return ".".join(module.split(":")[0].split(".")[:2])


def layers() -> Iterator[str]:
    """Imports that point the wrong way."""
    for module in trees():
        package = module.split(".")[0]
        for target in imports(module):
            other = target.split(":")[0].split(".")[0]
            if other in {*PACKAGES, "examples"} - {package, "cpomdp_ppl"}:
                yield f"{module} -> {target}"
            elif package == other == "cpomdp_ppl" and room(module) != "cpomdp_ppl":
                into = room(target)
                if f"{room(module)} -> {into}" in MAY_REACH_UP:
                    continue
                if into == "cpomdp_ppl" or LAYER[into] > LAYER[room(module)]:
                    yield f"{room(module)} -> {into}"


def code_lines(source: str, node: ast.AST) -> int:
    """Lines of a function that are neither blank, nor comments, nor docstrings."""
    lines = source.splitlines()
    counted = {
        i
        for i in range(node.lineno, node.end_lineno + 1)  # type: ignore[attr-defined]
        if lines[i - 1].strip() and not lines[i - 1].lstrip().startswith("#")
    }
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            docstring = inner.body[0]
            counted -= set(range(docstring.lineno, docstring.end_lineno + 1))  # type: ignore[operator]
    return len(counted)


def length() -> Iterator[str]:
    """Functions that are longer than one can take in."""
    for module, tree in trees().items():
        for name, node in functions(tree):
            if code_lines(sources()[module], node) > LINES_OF_A_FUNCTION:
                yield f"{module}.{name}"


SAME_NAME_SAME_MEANING = {
    "Exploring": "a policy as it plays to learn, of every algorithm that leaves actions to chance",
    "Fitting": "a fit at work, of every algorithm that learns a policy",
    "Learner": "what takes the gradient steps, of every algorithm that learns a policy",
    "compare": "the command of the function",
    "evaluate": "the command of the function; and exact values of a policy on an enumerated model",
    "fit": "what learns a policy, of every algorithm that does; and the command",
    "run": "the command of the function",
    "simulate": "the command of the function",
    "sweep": "over any function; and over fits, by the same sweep",
}


def names() -> Iterator[str]:
    """Public classes and functions of several modules that bear one name."""
    where = defaultdict(set)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].add(module)
    for name, modules in where.items():
        if len(modules) > 1 and name not in SAME_NAME_SAME_MEANING:
            yield name


# ------------------------------------------------------------------------------------------- the tests

RULES = {rule.__name__: rule for rule in (disk, algorithm, inference, layers, length, names)}


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_rules_are_kept(rule):
    assert sorted(set(RULES[rule]())) == [], RULES[rule].__doc__


ALLOWANCES = {
    "disk": MAY_TOUCH_THE_DISK,
    "inference": EXTENDS_INFERENCE,
    "layers": MAY_REACH_UP,
    "names": SAME_NAME_SAME_MEANING,
}


@pytest.mark.parametrize("rule", ALLOWANCES)
def test_allowances_are_needed(rule, monkeypatch):
    for allowance in tuple(ALLOWANCES[rule]):
        with monkeypatch.context() as patch:
            patch.delitem(ALLOWANCES[rule], allowance)
            assert set(RULES[rule]()), f"{allowance} needs none"


def test_public_modules_of_inference_are_used():
    used = {target.split(":")[0] for module in trees() for target in imports(module) if outside(module)}
    assert {f"cpomdp_ppl.inference.{name}" for name in PUBLIC_INFERENCE} <= used


def test_every_room_has_its_layer():
    assert {room(module) for module in trees() if module.startswith("cpomdp_ppl.")} <= set(LAYER)
