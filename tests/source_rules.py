"""Rules of the source trees, as functions over parsed modules."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORE = ROOT / "phyai-core/src"
MODEL_TREES = tuple(sorted(p for p in ROOT.glob("phyai-models-*/src") if p.is_dir()))
SOURCE_TREES = (CORE, *MODEL_TREES)
GATEWAY = ROOT / "phyai-gateway/src"
ALL_TREES = (*SOURCE_TREES, GATEWAY)

# Modules of `phyai` by layer; a module imports from its own layer or below.
LAYERS = {
    1: "errors types manifest cost media_files action_queue env config_fields config_mapping"
    " config_yaml",
    2: "kernels memory solver unipc weights hub parallel timers addresses compiling cuda_graph"
    " built_folder byte_tokenizer json_files memo",
    3: "layers backbones cache graph guidance rtc known step_unit",
    4: "adapter golden hooks plugins plugin_records plugin_rules services sessions session_options "
    "session_results session_turn session_moving binding "
    "kernel_setup tensor_dump backends request_values rtc_options",
    5: "runner bound request_watch scheduler joining result_checks batch_counts",
    6: "engine engine_core core_setup ranks engine_builder deployment warmup request_job "
    "request_loop",
    # kernel, runtime and server are compatibility re-exports.
    7: "cli profile scaffold testing kernel runtime server",
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names.split()}
TOP = max(LAYERS)
# Pure configuration: stands on layer 1, and everything from layer 4 up may read it.
CONFIG = "engine_config"
CONFIG_LOWEST_READER = 4
MODEL_LAYER = 4
# (importing module, imported module): imports that may point upward, each with its reason.
ALLOWED_UPWARD: frozenset[tuple[str, str]] = frozenset()

FAMILY_WORDS = (
    "groot", "gr00t", "cosmos", "minicpm", "siglip", "gemma", "paligemma", "openpi", "lerobot"
)  # fmt: skip
UNSAFE = frozenset(
    {"torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load",
     "marshal.loads", "eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
)  # fmt: skip
# What phyai_gateway imports nowhere, and what only some of its folders import: the gateway's own
# process stands on neither the engine nor numpy.
GATEWAY_NEVER = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
)
GATEWAY_ONLY = {
    "torch": ("server",),
    "phyai": ("server",),
    "numpy": ("server", "client"),
    "PIL": ("server", "client"),
    "phyai_gateway.server": ("server",),
    "phyai_gateway.client": ("client",),
}
ENV_READERS = frozenset({"phyai.env", "phyai.plugins", "phyai.plugin_records"})


@dataclass(frozen=True, slots=True)
class Module:
    """One source file: its dotted name, path and parsed text."""

    name: str
    path: Path
    text: str
    tree: ast.Module


def parse(name: str, text: str, path: Path = Path("made_up.py")) -> Module:
    return Module(name, path, text, ast.parse(text, str(path)))


def modules(tree_root: Path) -> list[Module]:
    """Return every module below a source root."""
    found = []
    for path in sorted(tree_root.rglob("*.py")):
        parts = list(path.relative_to(tree_root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found.append(parse(".".join(parts), path.read_text(encoding="utf-8"), path))
    return found


def module_names() -> frozenset[str]:
    """Return the dotted names of all modules and folders of the source trees."""
    names: set[str] = set()
    for tree in ALL_TREES:
        for module in modules(tree):
            parts = module.name.split(".")
            names |= {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return frozenset(names)


def plugin_folders() -> frozenset[str]:
    """Return the folders of `phyai.models` that are models: those named by an entry point."""
    found = set()
    for tree in MODEL_TREES:
        project = tomllib.loads((tree.parent / "pyproject.toml").read_text(encoding="utf-8"))
        points = project["project"]["entry-points"]["phyai.plugins"]
        found |= {value.split(".")[2] for value in points.values()}
    return frozenset(found)


# ---------------------------------------------------------------- layers


def layer_violations(
    module: Module, known_names: frozenset[str], models: frozenset[str]
) -> list[str]:
    """Return one line per import of the module that points upward or into another model."""
    own = _own_layer(module.name)
    if own is None:
        return [f"{module.name}: the module has no layer; add it to LAYERS"]
    return [
        f"{module.name}:{line} imports {target}: {problem}"
        for target, line in _imports(module, known_names)
        if (problem := _judge(module.name, own, target, models))
        and (module.name, target) not in ALLOWED_UPWARD
    ]


def _own_layer(name: str) -> int | None:
    if name == "phyai":  # the facade
        return TOP
    if name.startswith("phyai.models."):
        return MODEL_LAYER
    return 1 if _is_config(name) else LAYER_OF.get(name.split(".")[1])


def _is_config(name: str) -> bool:
    return re.match(rf"phyai\.{CONFIG}(_|\.|$)", name) is not None


def _judge(name: str, own: int, target: str, models: frozenset[str]) -> str:
    if target == "phyai":
        return "" if name.startswith("phyai.cli") else "the facade stands on top of everything"
    if target.startswith("phyai.models"):
        return _judge_model(name, target, models)
    if _is_config(target):
        low = own < CONFIG_LOWEST_READER and not _is_config(name)
        return f"layer {own} may not read the engine config" if low else ""
    of_target = LAYER_OF.get(target.split(".")[1])
    if of_target is None:
        return "the imported module has no layer; add it to LAYERS"
    return f"layer {of_target} from layer {own}" if of_target > own else ""


def _judge_model(name: str, target: str, models: frozenset[str]) -> str:
    if not name.startswith("phyai.models."):
        return "core never imports a model package"
    own, other = name.split(".")[2], [*target.split("."), ""][2]
    if other == own:
        return ""
    return "a model imports no other model" if other in models else ""


def _imports(module: Module, known_names: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of every run-time import below phyai, also inside functions."""
    for target, line in _all_imports(module, known_names):
        if target == "phyai" or target.startswith("phyai."):
            yield target, line


def _all_imports(module: Module, known_names: frozenset[str]) -> Iterator[tuple[str, int]]:
    for node in _runtime_nodes(module.tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = _from_targets(module, node, known_names)
        elif isinstance(node, ast.Call):
            targets = _import_module_call(node)
        else:
            continue
        yield from ((target, node.lineno) for target in targets)


def _runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.orelse:
                yield child
                yield from _runtime_nodes(child)
            continue
        yield node
        yield from _runtime_nodes(node)


def _from_targets(module: Module, node: ast.ImportFrom, known_names: frozenset[str]) -> list[str]:
    base = node.module or ""
    if node.level:
        parts = module.name.split(".")
        drop = node.level - (module.path.name == "__init__.py")
        base = ".".join([*parts[: len(parts) - drop], *([base] if base else [])])
    below = [f"{base}.{alias.name}" for alias in node.names if alias.name != "__version__"]
    return [name if name in known_names else base for name in below]


def _import_module_call(node: ast.Call) -> list[str]:
    called = ast.unparse(node.func).split(".")[-1]
    if called not in {"import_module", "__import__"} or not node.args:
        return []
    first = node.args[0]
    return [str(first.value)] if isinstance(first, ast.Constant) else []


# ---------------------------------------------------------------- the gateway


def gateway_violations(module: Module, known_names: frozenset[str]) -> list[str]:
    """Return one line per import of a phyai_gateway module that its folder may not have."""
    folder = [*module.name.split("."), ""][1]
    return [
        f"{module.name}:{line} imports {target}"
        for target, line in _all_imports(module, known_names)
        if target.split(".")[0] in GATEWAY_NEVER
        or any(
            folder not in allowed and f"{target}.".startswith(f"{name}.")
            for name, allowed in GATEWAY_ONLY.items()
        )
    ]


# ---------------------------------------------------------------- names


def name_pattern(known_plugins: Path = CORE / "phyai/known_plugins.json") -> re.Pattern[str]:
    """Return what finds a model's name: family words anywhere, plugin ids and aliases as words."""
    known = json.loads(known_plugins.read_text(encoding="utf-8"))
    ids = {*known, *(alias for entry in known.values() for alias in entry.get("aliases", ()))}
    parts = [*FAMILY_WORDS, *(rf"(?<![a-z0-9]){name}(?![a-z0-9])" for name in sorted(ids))]
    parts.append(r"(?<![a-z0-9])(?:pi|\u03c0)_?0")
    return re.compile(rf"(?i:{'|'.join(parts)})|(?<=[a-z0-9])P[iI]0")


def model_names(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return ``line: name`` for every model name in a Python text, comments included."""
    return [
        f"{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in pattern.finditer(line)
    ]


# ---------------------------------------------------------------- safety and environment


def unsafe_uses(tree: ast.Module) -> list[str]:
    """Return ``line: what`` for calls and imports that run or unpickle foreign data."""
    return [f"{line}: {what}" for node in ast.walk(tree) for line, what in _unsafe(node)]


def _unsafe(node: ast.AST) -> Iterable[tuple[int, str]]:
    if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in UNSAFE:
        yield from () if _reads_tensors_only(name, node) else ((node.lineno, name),)
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if (name := f"{node.module}.{alias.name}") in UNSAFE:
                yield node.lineno, name
    if isinstance(node, ast.keyword):
        harmless = isinstance(node.value, ast.Constant) and node.value.value is False
        if node.arg == "allow_pickle" and not harmless:
            yield node.value.lineno, "allow_pickle"
        if node.arg == "trust_remote_code":
            yield node.value.lineno, "trust_remote_code"
    if isinstance(node, ast.Constant) and node.value == "trust_remote_code":
        yield node.lineno, "trust_remote_code"


def _reads_tensors_only(name: str, call: ast.Call) -> bool:
    """Return whether a torch.load is told, in so many words, to unpickle nothing but tensors."""
    if name != "torch.load":
        return False
    told = [word.value for word in call.keywords if word.arg == "weights_only"]
    return len(told) == 1 and isinstance(told[0], ast.Constant) and told[0].value is True


def environment_reads(tree: ast.Module) -> list[str]:
    """Return ``line: key`` for reads of PHYAI_ variables, and of keys that are no literal."""
    found = []
    for node in ast.walk(tree):
        key = _environment_key(node)
        literal = key.value if isinstance(key, ast.Constant) else None
        if key is not None and (not isinstance(literal, str) or literal.startswith("PHYAI_")):
            found.append(f"{key.lineno}: {ast.unparse(key)}")
    return found


def _environment_key(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
        return node.slice if isinstance(node.ctx, ast.Load) else None
    if isinstance(node, ast.Call) and node.args:
        called = ast.unparse(node.func)
        return node.args[0] if called.endswith(("environ.get", "getenv", "environ.pop")) else None
    if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]).endswith("environ"):
        return node.left
    return None


# ---------------------------------------------------------------- kernels


def kernel_modules(found: Iterable[Module]) -> set[str]:
    """Return the names of the modules that define a Triton kernel."""
    return {
        module.name
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(mark).startswith("triton.jit") for mark in node.decorator_list)
    }


def kernel_problems(found: Iterable[Module], functions: Iterable[object]) -> list[str]:
    """Return one line per kernel file that no row names, and per row that names nothing.

    functions: the ``fn`` of every row; those of Triton rows are ``"module:function"``.
    """
    by_name = {module.name: module for module in found}
    named = [fn.partition(":")[::2] for fn in functions if isinstance(fn, str)]
    orphans = kernel_modules(by_name.values()) - {module for module, _ in named}
    lines = [f"{name}: no row of the op table names it" for name in sorted(orphans)]
    for module, function in named:
        if not module.startswith("phyai."):
            continue
        tree = by_name[module].tree if module in by_name else ast.Module([], [])
        if not any(isinstance(n, ast.FunctionDef) and n.name == function for n in tree.body):
            lines.append(f"{module}:{function}: a row names it, but it is not there")
    return lines
