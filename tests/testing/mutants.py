"""Every mutant of the correct policy: the line that is wrong and the check that catches it."""

from __future__ import annotations

from tests.testing import mutants_start
from tests.testing.policies import VELOCITY, Mutant

_RUN = "l2_requests_succeed"
_ROWS = ("l2_rows_of_a_bucket_keep_their_bits", "l2_rows_of_other_buckets_stay_close")
_TRUTH = ("l2_goldens_are_kept", "l2_reference_is_matched")
_DECODE = '        model = x["action"].numpy()\n'
_ENCODE = '        cache["features"].copy_(features)\n'
_SOLVER = "        return Euler()\n"
_COLOUR = "        image = row.images[CAMERA]\n"
_ROWS_LINE = (
    "        rows = observations(request, max_rows=self.args.max_batch_size, options=OPTIONS)\n"
)
_KEY = 'Key(num_steps=self._steps(rows), rtc="guided" if guided else "off")'

MUTANTS: dict[str, Mutant] = {
    **mutants_start.MUTANTS,
    # ------------------------------------------------------------ numerics
    "NaN result": Mutant(
        "model",
        ((VELOCITY, f"{VELOCITY}        velocity = velocity / 0 * 0\n"),),
        _RUN,
        "must succeed; got ActionRejected",
    ),
    "solver returns its noise": Mutant(
        "model",
        (
            (
                _SOLVER,
                "        class Idle(Euler):\n"
                "            def solve(self, denoiser, x, cache, grid, *more):\n"
                "                return x\n\n        return Idle()\n",
            ),
        ),
        "l2_result_is_the_models",
        "it is the noise 'action' itself",
        also=(*_TRUTH, "l2_rtc_follows_the_left_over", "l2_identity_wrappers_change_nothing"),
    ),
    "solver of its own network": Mutant(
        "model",
        (
            (
                _SOLVER,
                "        network = self.network\n\n        class Private(Euler):\n"
                "            def solve(self, denoiser, x, cache, grid, *more):\n"
                "                return super().solve(network, x, cache, grid)\n\n"
                "        return Private()\n",
            ),
        ),
        "l2_identity_wrappers_change_nothing",
        "denoiser network was not",
        also=("l2_rtc_follows_the_left_over",),
    ),
    "output scaled by 1.01": Mutant(
        "model",
        (("actions=chunk * SCALE", "actions=chunk * SCALE * np.float32(1.01)"),),
        "l2_reference_is_matched",
        "must equal the reference; actions differs by up to",
        also=("l2_goldens_are_kept",),
    ),
    "cache that leaks between requests": Mutant(
        "model",
        ((_ENCODE, '        cache["features"].mul_(0.5).add_(features)\n'),),
        "l2_nothing_stays_between_requests",
        "Write every buffer in encode(), or declare it with zero=True",
        also=(
            "l1_loads_twice",
            "l2_same_noise_gives_same_result",
            "l2_seed_decides_the_noise",
            "l2_given_noise_is_used",
            "l2_identity_wrappers_change_nothing",
            "l2_recorded_graphs_equal_eager",
            "l2_rtc_follows_the_left_over",
            *_ROWS,
            "l2_padded_buckets_change_nothing",
            "l3_threads_get_their_own_results",
            "l3_malformed_requests_are_refused",
            "l3_queued_request_can_be_cancelled",
        ),
        maybe=(*_TRUTH, "l2_declared_precisions_run"),
    ),
    "rows that mix": Mutant(
        "model",
        ((_ENCODE, "        features = 1.5 * features - 0.5 * features.mean(0)\n" + _ENCODE),),
        "l2_rows_of_a_bucket_keep_their_bits",
        "a row must not depend on the rows beside it",
        also=(
            "l2_rows_of_other_buckets_stay_close",
            "l2_padded_buckets_change_nothing",
            "l2_reference_is_matched",
        ),
        maybe=("l2_goldens_are_kept",),
    ),
    "padding rows that count": Mutant(
        "model",
        (
            (
                _ENCODE,
                "        valid = cache.rows_valid.float().mean() * features\n"
                '        cache["features"].copy_(valid)\n',
            ),
        ),
        "l2_padded_buckets_change_nothing",
        "must give the same in padded buckets",
        also=_ROWS,
        maybe=("l2_rows_of_a_bucket_keep_their_bits",),
    ),
    "padding of a longer prompt that counts": Mutant(
        "model",
        (
            (
                "self._state(row) for row in rows",
                "self._state(row) * (1 + max(len(str(r.prompt)) for r in rows)"
                " - len(str(row.prompt))) for row in rows",
            ),
        ),
        "l2_rows_of_a_bucket_keep_their_bits",
        "a row must not depend on the rows beside it; with 2 other rows",
        also=("l2_rows_of_other_buckets_stay_close",),
    ),
    "data in the key": Mutant(
        "model",
        (
            (
                _KEY,
                "Key(self._steps(rows), extra=tuple((str(i), r.seed) for i, r in enumerate(rows)),"
                ' rtc="guided" if guided else "off")',
            ),
        ),
        "l2_rows_of_a_bucket_keep_their_bits",
        "must have equal keys",
    ),
    "seed that is ignored": Mutant(
        "model",
        (('draw_noise(SHAPE, options.get("seed"))', "draw_noise(SHAPE, 0)"),),
        "l2_seed_decides_the_noise",
        "seeds 11 and 12 must give different noise",
        also=("l3_malformed_requests_are_refused",),
    ),
    "noise that is ignored": Mutant(
        "model",
        (('        noise = options.get("noise")\n', "        noise = None\n"),),
        "l2_given_noise_is_used",
        "option noise must be what the solver starts from",
        also=("l2_goldens_are_kept", "l3_malformed_requests_are_refused"),
    ),
    "noise drawn inside the solve": Mutant(
        "model",
        (
            (
                "    def denoiser(self)",
                "    def start(self, cache: Any) -> Any:\n"
                '        return {"action": torch.randn_like(cache.inputs["noise.action"])}\n\n'
                "    def denoiser(self)",
            ),
        ),
        "l2_same_noise_gives_same_result",
        "draw noise in prepare() from options['seed']",
        also=(
            "l1_loads_twice",
            *_TRUTH,
            "l2_seed_decides_the_noise",
            "l2_given_noise_is_used",
            "l2_nothing_stays_between_requests",
            *_ROWS,
            "l2_padded_buckets_change_nothing",
            "l2_recorded_graphs_equal_eager",
            "l2_identity_wrappers_change_nothing",
            "l2_rtc_follows_the_left_over",
            "l3_threads_get_their_own_results",
            "l3_malformed_requests_are_refused",
            "l3_queued_request_can_be_cancelled",
        ),
        maybe=("l2_declared_precisions_run",),
    ),
    "noise drawn in the captured region alone": Mutant(
        "model",
        ((_ENCODE, "        features = features + 0.0 * torch.randn_like(features)\n" + _ENCODE),),
        "l2_recorded_graphs_equal_eager",
        "draws random numbers",
    ),
    "branch on data in the captured region": Mutant(
        "model",
        ((_ENCODE, "        if float(features.sum()) > 1e9:\n            return\n" + _ENCODE),),
        "l2_recorded_graphs_equal_eager",
        "which waits for the device",
    ),
    "request data on the adapter": Mutant(
        "model",
        (
            (_ENCODE, "        features = features * getattr(self, 'gain', 1.0)\n" + _ENCODE),
            (
                "        self.network = network\n",
                "        self.network = network\n\n"
                "    def plan(self, cache: Any, batch: Any) -> None:\n"
                "        self.gain = float(batch.tensors['state'][0, 0])\n",
            ),
        ),
        "l2_recorded_graphs_equal_eager",
        "A replay runs no Python",
        also=(*_TRUTH, "l2_rows_of_other_buckets_stay_close"),
    ),
    "wrong shape": Mutant(
        "model",
        (("actions=chunk * SCALE", "actions=(chunk * SCALE)[:, :2]"),),
        "l2_results_are_well_formed",
        "names must hold one text per action (2)",
        also=_TRUTH,
    ),
    "wrong dtype": Mutant(
        "model",
        (("actions=chunk * SCALE", "actions=(chunk * SCALE).astype(np.float64)"),),
        "l2_results_are_well_formed",
        "actions must be a float32 array [H, A]; got float64 [4, 3]",
        maybe=("l2_goldens_are_kept",),
    ),
    "unit of another action": Mutant(
        "model",
        (("units=UNITS", "units=UNITS[:2]"),),
        "l2_results_are_well_formed",
        "units must hold one text per action (3)",
    ),
    "mask of another length": Mutant(
        "model",
        (("mask=np.ones(HORIZON, bool)", "mask=np.ones(HORIZON + 1, bool)"),),
        "l2_results_are_well_formed",
        "mask must be a bool array [4]; got bool [5]",
    ),
    "result in a buffer": Mutant(
        "model",
        (
            (
                _DECODE,
                '        self.kept = getattr(self, "kept", torch.zeros(4, *SHAPE))\n'
                '        self.kept[: len(x["action"])].copy_(x["action"])\n'
                '        model = self.kept[: len(x["action"])].numpy()\n',
            ),
        ),
        "l2_results_keep_their_values",
        "must keep its values when another request runs; model_actions",
        maybe=("l3_threads_get_their_own_results", "l3_queued_request_can_be_cancelled"),
    ),
    "input that is changed": Mutant(
        "model",
        ((_COLOUR, f'        row.options.setdefault("num_steps", STEPS)\n{_COLOUR}'),),
        "l2_inputs_are_not_changed",
        "request.options was",
    ),
    "image that is changed in place": Mutant(
        "model",
        ((_COLOUR, f"{_COLOUR}        np.copyto(image, image // 2 * 2)\n"),),
        "l2_inputs_are_not_changed",
        "request.images['front'] was",
        maybe=(*_TRUTH, "l3_malformed_requests_are_refused"),
    ),
    "precision with another sign": Mutant(
        "model",
        (
            (
                VELOCITY,
                f"{VELOCITY}        velocity = velocity if inside.dtype == torch.float32 "
                "else -velocity\n",
            ),
        ),
        "l2_declared_precisions_run",
        "precision bf16 must stay near float32",
    ),
    "rtc that does nothing": Mutant(
        "model",
        (("            tensors.update(self._rtc(rtc))\n", "            guided = False\n"),),
        "l2_rtc_follows_the_left_over",
        "must pull the chunk to the left-over",
    ),
    # ------------------------------------------------------------ serving
    "prepare that shares": Mutant(
        "model",
        (
            (_ROWS_LINE, f"{_ROWS_LINE}        self.rows = rows\n"),
            (
                "self._noise(row.options) for row in rows",
                "self._noise(row.options) for row in self.rows",
            ),
        ),
        "l3_prepare_is_thread_safe",
        "prepare() must be thread-safe",
        maybe=("l3_threads_get_their_own_results",),
    ),
    "untyped error": Mutant(
        "model",
        (
            (
                "        if not np.isfinite(state).all():\n            raise RequestError(",
                "        if not np.isfinite(state).all():\n            raise ValueError(",
            ),
        ),
        "l3_malformed_requests_are_refused",
        "a request with a state with NaN must give a RequestError; got ValueError",
    ),
    "untyped error for an option": Mutant(
        "model",
        (("any(n != steps[0] for n in steps)", "len(set(steps)) > 1"),),
        "l3_malformed_requests_are_refused",
        "option num_steps [10] must give a RequestError; got TypeError",
    ),
    "no check of the input": Mutant(
        "model",
        (("        unknown = sorted(set(row.images) - {CAMERA})\n", "        unknown = []\n"),),
        "l3_malformed_requests_are_refused",
        "an image of an unknown camera must give a RequestError; it ran",
    ),
    "memory that grows": Mutant(
        "model",
        (
            (
                _ROWS_LINE,
                f"{_ROWS_LINE}        self.history = [*getattr(self, 'history', []), "
                "torch.zeros(4)]\n",
            ),
        ),
        "l3_memory_is_steady_over_200_requests",
        "grew from",
        only=("l3_memory*",),
    ),
    "host memory that grows": Mutant(
        "model",
        (
            (
                _ROWS_LINE,
                f"{_ROWS_LINE}        self.history = getattr(self, 'history', b'') + bytes(4000)\n",
            ),
        ),
        "l3_memory_is_steady_over_200_requests",
        "Python bytes grew from",
        only=("l3_memory*",),
    ),
    "noise that is kept": Mutant(
        "model",
        (
            (
                '            return draw_noise(SHAPE, options.get("seed"))\n',
                '            seed = options.get("seed")\n'
                '            self.kept = getattr(self, "kept", {})\n'
                "            return self.kept.setdefault(seed, draw_noise(SHAPE, seed))\n",
            ),
        ),
        "l3_memory_is_steady_over_200_requests",
        "tensors grew from",
        only=("l3_memory*",),
    ),
    "another result in a worker": Mutant(
        "model",
        (
            (
                VELOCITY,
                f"{VELOCITY}        import multiprocessing\n\n"
                "        if multiprocessing.parent_process() is not None:\n"
                "            velocity = 2 * velocity\n",
            ),
        ),
        "l3_visible_in_a_spawned_process",
        "must give the same in a worker",
        only=("l3_visible_*",),
    ),
}
