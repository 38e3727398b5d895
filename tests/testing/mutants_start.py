"""Mutants whose package or load is wrong; see ``mutants``."""

from __future__ import annotations

from tests.testing.policies import LOAD, VELOCITY, Mutant

MUTANTS: dict[str, Mutant] = {
    # ------------------------------------------------------------ package
    "manifest imports torch": Mutant(
        "plugin",
        (("from phyai.hooks", "import torch  # noqa: F401\n\nfrom phyai.hooks"),),
        "l0_manifest_imports_no_torch",
        "must not import torch",
        also=("l0_entry_point_is_installed",),
        only=("l0_*",),
    ),
    "manifest differs between processes": Mutant(
        "plugin",
        (
            ("from phyai.hooks", "import os\n\nfrom phyai.hooks"),
            ('summary="a small', 'summary=f"{os.getpid()} a small'),
        ),
        "l0_manifest_survives_json",
        "must be the same in every process; summary differs",
        only=("l0_*",),
    ),
    "written for a newer API": Mutant(
        "plugin",
        (('id="toy_policy",', 'id="toy_policy",\n        api=(1, 99),'),),
        "l0_api_version_fits",
        "needs adapter API 1.99",
        also=("l0_can_be_selected",),
        only=("l0_*",),
    ),
    "target that is not there": Mutant(
        "plugin",
        (("model:ToyPolicy", "model:ToyPolicies"),),
        "l0_adapter_class_keeps_the_contract",
        "Did you mean 'ToyPolicy'",
        only=("l0_*",),
    ),
    "arguments that hold a lambda": Mutant(
        "model",
        (
            (
                "    precision: str | None = None\n",
                "    precision: str | None = None\n"
                "    clip: Any = None\n\n    def __post_init__(self) -> None:\n"
                "        self.clip = lambda x: x\n",
            ),
        ),
        "l0_adapter_class_keeps_the_contract",
        "must survive pickle",
        only=("l0_*",),
    ),
    "preset that is not there": Mutant(
        "plugin",
        (("presets:sample", "presets:samples"),),
        "l0_named_functions_exist",
        "must offer 'correct_policy.presets:samples'",
        only=("l0_*",),
    ),
    "option nobody knows": Mutant(
        "plugin",
        (('"options": ["seed",', '"options": ["sead",'),),
        "l0_capabilities_are_well_formed",
        "capability 'options' must be a list of options",
        only=("l0_*",),
    ),
    # ------------------------------------------------------------ load
    "load that is not strict": Mutant(
        "model",
        (("strict=True", "strict=False"),),
        "l1_dropped_tensor_is_named",
        "must be refused; it was loaded",
        also=("l1_extra_tensor_is_named", "l1_renamed_tensor_is_named"),
    ),
    "load that copies what fits": Mutant(
        "model",
        (
            (
                LOAD,
                "        from safetensors.torch import load_file\n"
                "        stored = load_file(folder / 'model.safetensors')\n"
                "        for name, tensor in self.network.named_parameters():\n"
                "            if name in stored and stored[name].shape == tensor.shape:\n"
                "                tensor.data.copy_(stored[name])\n"
                "        return LoadReport()\n",
            ),
        ),
        "l1_misshaped_tensor_is_named",
        "with another shape of 'see.bias' must be refused",
        also=(
            "l1_dropped_tensor_is_named",
            "l1_extra_tensor_is_named",
            "l1_renamed_tensor_is_named",
        ),
        maybe=("l1_loads_twice", "l2_declared_precisions_run"),
    ),
    "load error without a name": Mutant(
        "model",
        (
            (
                LOAD,
                "        try:\n            return load_pretrained(self.network, folder)\n"
                "        except Exception:\n            from phyai.errors import CheckpointError\n"
                "            raise CheckpointError('the checkpoint is broken') from None\n",
            ),
        ),
        "l1_dropped_tensor_is_named",
        "must name 'see.bias'; got 'the checkpoint is broken'",
        also=(
            "l1_extra_tensor_is_named",
            "l1_renamed_tensor_is_named",
            "l1_misshaped_tensor_is_named",
        ),
    ),
    "absent folder without a typed error": Mutant(
        "model",
        (
            (
                "        folder = hub.resolve(self.args.checkpoint_dir)\n",
                "        import os\n        from pathlib import Path\n"
                "        os.listdir(folder := Path(self.args.checkpoint_dir))\n",
            ),
        ),
        "l1_absent_checkpoint_is_a_typed_error",
        "must give a CheckpointError; got FileNotFoundError",
    ),
    "second engine over class state": Mutant(
        "model",
        (
            (
                "        self.network = Network(self.services.dtype)\n",
                "        self.network = Network(self.services.dtype)\n"
                "        ToyPolicy.engines = getattr(ToyPolicy, 'engines', 0) + 1\n",
            ),
            (VELOCITY, f"{VELOCITY}        velocity = velocity + 0.001 * ToyPolicy.engines\n"),
        ),
        "l1_loads_twice",
        "must give the same result",
        also=(
            "l2_same_noise_gives_same_result",
            "l2_nothing_stays_between_requests",
            "l2_reference_is_matched",
            "l2_goldens_are_kept",
            "l2_identity_wrappers_change_nothing",
            "l2_rtc_follows_the_left_over",
            "l3_threads_get_their_own_results",
            "l3_malformed_requests_are_refused",
            "l3_queued_request_can_be_cancelled",
        ),
        maybe=("l2_rows_of_other_buckets_stay_close",),
    ),
    "close that works once": Mutant(
        "model",
        (
            (
                "    def denoiser(self)",
                "    def close(self) -> None:\n        del self.network\n\n    def denoiser(self)",
            ),
        ),
        "l1_closes_twice",
        "close() of the adapter must be harmless when called again; got AttributeError",
    ),
}
