"""Broken adapter plugins: each is one whole distribution, with how it is told apart."""

from __future__ import annotations

from dataclasses import dataclass

from phyai.testing.sandbox import MODEL, Sandbox, plugin_source

HOOKIMPL = "from phyai.hooks import hookimpl\n"


@dataclass(frozen=True)
class Broken:
    """code: source of the plugin module.  status and words: how `phyai plugins` shows it.

    model: source of the module that the manifest names.
    """

    code: str
    status: str
    words: str
    model: str = MODEL


def correct(plugin_id: str, more: str = "") -> str:
    return plugin_source(plugin_id, f"{plugin_id}_dist", more)


LISTED: dict[str, Broken] = {
    "z_import": Broken("import nothing_of_this_name\n", "import-error", "ModuleNotFoundError"),
    "z_syntax": Broken("def broken(:\n", "import-error", "SyntaxError"),
    "z_exit": Broken("import sys\nsys.exit('bye')\n", "import-error", "SystemExit: bye"),
    "z_prints": Broken(
        "print('{\"plugins\": []}')\nraise RuntimeError('after printing')\n",
        "import-error",
        "RuntimeError: after printing",
    ),
    "z_torch": Broken(
        "import torch\n" + correct("z_torch"), "invalid", "must not import torch, directly"
    ),
    "z_newfield": Broken(
        correct("z_newfield", ", sumary='twice'"),
        "invalid",
        "has no field 'sumary' in adapter API 1.0. Did you mean 'summary'?",
    ),
    "z_argument": Broken(
        correct("z_argument") + "@hookimpl\ndef phyai_output(adapter, servces): pass\n",
        "invalid",
        "Hook 'phyai_output' of plugin 'z_argument' has no argument 'servces'. "
        "Did you mean 'services'?",
    ),
    "z_misspelt": Broken(
        correct("z_misspelt") + "@hookimpl\ndef phyai_validate_actoin(chunk): pass\n",
        "invalid",
        "Hook 'phyai_validate_actoin' of plugin 'z_misspelt' does not exist. "
        "Did you mean 'phyai_validate_action'?",
    ),
    "z_major": Broken(
        correct("z_major", ", api=(2, 0)"),
        "incompatible",
        "needs adapter API 2.0, this phyai-core has 1.0. Upgrade phyai-core.",
    ),
    "z_minor": Broken(
        correct("z_minor", ", api=(1, 7)"),
        "incompatible",
        "needs adapter API 1.7, this phyai-core has 1.0. Upgrade phyai-core.",
    ),
    "z_old": Broken(
        correct("z_old", ", api=(0, 3)"),
        "incompatible",
        "needs adapter API 0.3, this phyai-core has 1.0. Upgrade the plugin.",
    ),
    "z_json": Broken(
        correct("z_json", ", capabilities={'shape': {1, 2}}"),
        "invalid",
        "capabilities must survive JSON unchanged",
    ),
    "z_nan": Broken(
        correct("z_nan", ", capabilities={'control_hz': float('nan')}"),
        "invalid",
        "finite numbers",
    ),
    "z_id": Broken(correct("another_id").replace("another_id_dist", "z_id_dist"), "invalid",
                   "id must equal the plugin's name 'z_id'; got 'another_id'"),
    "z_nothing": Broken("ANSWER = 42\n", "invalid", "must implement phyai_adapter()"),
    "z_adapter": Broken(
        HOOKIMPL + "@hookimpl\ndef phyai_adapter():\n    return {}['id']\n",
        "invalid",
        "KeyError: 'id'",
    ),
}  # fmt: skip
"""Broken where listing sees it."""


STARTED: dict[str, Broken] = {
    "s_module": Broken(
        correct("s_module").replace("s_module_dist.model:Model", "s_module_dist.modle:Model"),
        "ok",
        "'s_module_dist.modle:Model' cannot be imported: ModuleNotFoundError",
    ),
    "s_class": Broken(
        correct("s_class").replace("model:Model", "model:Modle"),
        "ok",
        "target must name an object of module 's_class_dist.model'; got 'Modle'. "
        "Did you mean 'Model'?",
    ),
    "s_exit": Broken(
        correct("s_exit"), "ok", "cannot be imported: SystemExit: 4", "raise SystemExit(4)\n"
    ),
    "s_methods": Broken(
        correct("s_methods"),
        "ok",
        "lacks load(), prepare()",
        MODEL[: MODEL.index("    def load")],
    ),
    "s_init": Broken(
        correct("s_init"),
        "ok",
        "must be constructed as Model(args, config, services)",
        MODEL.replace("def __init__(self, args, config, services)", "def __init__(self)"),
    ),
    "s_args": Broken(
        correct("s_args"),
        "ok",
        "args must name a dataclass; got <class 's_args_dist.model.Args'>",
        MODEL.replace("@dataclass\n", ""),
    ),
    "s_entry": Broken(
        correct("s_entry"),
        "ok",
        "is an Entry (setup and step), which this runtime cannot run",
        "class Args: pass\nclass Model:\n    def setup(self): pass\n    def step(self): pass\n",
    ),
}
"""Broken where selecting it, which imports the adapter's module, sees it."""


def install(sandbox: Sandbox, *names: str) -> None:
    """Install these broken plugins, each as distribution ``<name>-dist`` 1.0."""
    for name in names:
        broken = {**LISTED, **STARTED}[name]
        sandbox.adapter(name, broken.code, dist=f"{name.replace('_', '-')}-dist",
                        model=broken.model)  # fmt: skip
