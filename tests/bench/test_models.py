"""The models that can be paired: released sizes, random weights, requests, golden actions."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import sys
from pathlib import Path

import pytest
import torch
from benchmarks import paired
from benchmarks.peers import sides
from benchmarks.peers.cosmos.batch import Batch as CosmosBatch
from benchmarks.peers.cosmos.sizes import CosmosSizes
from benchmarks.peers.groot.batch import Batch as GrootBatch
from benchmarks.peers.groot.sizes import BACKBONE_FILE, GrootSizes
from benchmarks.peers.minicpm.batch import Batch as MiniCPMBatch
from benchmarks.peers.minicpm.sizes import FULL, LINEAR, MiniCPMSizes
from benchmarks.peers.models import MODELS
from benchmarks.peers.pairing import Probe
from benchmarks.peers.pi.batch import Batch as PiBatch
from benchmarks.peers.pi.sizes import PiSizes
from benchmarks.peers.weights import (
    cached_checkpoint,
    draw,
    place,
    weight_files,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file

from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.vae.config import VAEConfig
from phyai.models.minicpm_robot.config import MiniCPMRobotConfig
from phyai.models.pi.config import PiConfig
from tests.bench.small_sizes import SMALL, small_pi

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden"
GROOT_GOLDEN, MINICPM_GOLDEN = GOLDEN / "groot", GOLDEN / "minicpm"
COSMOS_GOLDEN = GOLDEN / "cosmos3"
# Released files hold more: pi's unused output head of the expert; GR00T's output head, final norm;
# Cosmos3's output head. Its autoencoder has 196 tensors.
RELEASED = {
    "pi05": (812 - 1, 3.617e9 - 263.32e6),
    "pi0": (777 - 1, 3.50e9 - 263.32e6),
    "gr00t_n17": (1031 - 2, 3.1425e9),
    "minicpm_robot": (1023, 1.5363e9),
    "cosmos3": (814 - 1 + 196, 15.17367e9 - 622.33e6 + 704.69e6),
    "cosmos3_policy": (809 - 1 + 196, 15.17314e9 - 622.33e6 + 704.69e6),
}
PARTS = {  # millions of parameters
    "backbone.model.model.visual.": 407.0,
    "backbone.model.model.language_model.layers.": 805.4,
    "backbone.model.model.language_model.embed_tokens.": 311.2,
    "action_head.model.": 1091.7,
    "action_head.vl_self_attention.": 201.4,
    "action_head.action_encoder.": 233.1,
    "action_head.state_encoder.": 54.7,
    "action_head.action_decoder.": 37.9,
}
MINICPM_PARTS = {
    "vlm.llm.": 752.2,
    "vlm.vpm.": 417.8,
    "vlm.vit_merger.": 104.5,
    "vlm.resampler.": 26.0,
    "action_head.": 235.8,
    "action_head.action_": 96.8,
}
USUAL_STAGES = {"vision", "prefix", "loop"}
STAGES = {  # ours, and the first peer's
    "cosmos3_policy": (USUAL_STAGES, {"vision", "loop"}),
    "cosmos3": ({"prefix", "loop", "decode"}, {"vision", "loop", "decode"}),
}
COSMOS_PARTS = {"vae/encoder.": 149.6, "vae/": 704.7, "transformer/embed_tokens.": 622.3}


@pytest.mark.parametrize("name", MODELS)
def test_released_sizes_have_the_released_tensors(name: str) -> None:
    model = MODELS[name]
    named = dict(model.of_depth(model.released_layers).tensors())
    tensors, parameters = RELEASED[name]
    assert len(named) == tensors
    assert sum(map(math.prod, named.values())) == pytest.approx(parameters, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "parts"),
    [("gr00t_n17", PARTS), ("minicpm_robot", MINICPM_PARTS), ("cosmos3_policy", COSMOS_PARTS)],
)
def test_the_parts_have_the_published_parameters(name: str, parts: dict[str, float]) -> None:
    model = MODELS[name]
    named = dict(model.of_depth(model.released_layers).tensors())
    for part, millions in parts.items():
        found = sum(math.prod(shape) for key, shape in named.items() if key.startswith(part))
        assert found / 1e6 == pytest.approx(millions, abs=0.06), part


def test_positions() -> None:
    assert PiSizes().positions(3, 200) == 968
    assert PiSizes().positions(2, 20) == 532
    assert GrootSizes.of_depth(16).positions(2, 24) == 156
    assert MiniCPMSizes.of_depth(24).positions(3, 64) == 271
    policy, video = (CosmosSizes.of_depth(36, kind=kind) for kind in ("policy", "video"))
    assert policy.positions(1, 110) == video.positions(4, 110) == 120
    assert (policy.media_tokens(17), video.media_tokens(17)) == (3060 + 32, 3060)


@pytest.mark.parametrize("name", MODELS)
def test_half_depth_cuts_every_stack(name: str) -> None:
    model = MODELS[name]
    half = model.of_depth(model.released_layers // 2)
    assert half.layers == model.released_layers // 2
    if isinstance(half, GrootSizes):
        assert half.vision_layers == 12
        assert half.vision["deepstack_visual_indexes"] == [2, 5, 8]
        assert (half.dit["num_layers"], half.vlsa["num_layers"]) == (16, 2)
    elif isinstance(half, MiniCPMSizes):
        assert half.text["layer_types"] == [LINEAR, LINEAR, LINEAR, FULL] * 3
        assert (half.vision_layers, half.config["insert_layer_id"]) == (14, 3)
        assert half.dit["num_layers"] == 8
    elif isinstance(half, CosmosSizes):
        assert half.transformer["vocab_size"] == 151936 // 2
        assert (half.vae["base_dim"], half.vae["decoder_base_dim"]) == (112, 184)
        assert half.transformer["sound_gen"] is (name == "cosmos3")
    else:
        assert isinstance(half, PiSizes)
        assert (half.vision_layers, half.expert.num_hidden_layers) == (14, 9)


def test_the_least_depth_of_gr00t_keeps_three_taps_in_order() -> None:
    least = GrootSizes.of_depth(MODELS["gr00t_n17"].least_layers)
    taps = least.vision["deepstack_visual_indexes"]
    assert taps == sorted(set(taps))
    assert taps[-1] < least.vision_layers
    assert least.dit["num_layers"] % 4 == 0


def test_the_least_depth_of_minicpm_keeps_every_kind_of_layer() -> None:
    least = MiniCPMSizes.of_depth(MODELS["minicpm_robot"].least_layers)
    assert set(least.text["layer_types"]) == {LINEAR, FULL}
    assert 0 <= least.config["insert_layer_id"] < least.vision_layers - 1
    assert least.dit["num_layers"] % 2 == 0


@pytest.mark.parametrize("name", MODELS)
def test_sizes_survive_the_files(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL[name], seed=0)
    assert MODELS[name].from_folder(tmp_path) == SMALL[name]


def test_the_files_are_those_of_the_released_layout(tmp_path: Path) -> None:
    for name in ("pi0", "pi05"):
        write_checkpoint(tmp_path, SMALL[name], seed=0)
        config = PiConfig.from_folder(tmp_path, name)  # type: ignore[arg-type]
        assert (config.chunk_size, config.num_cameras, config.text.hidden_size) == (6, 3, 48)
        assert config.max_state_dim == 5
    write_checkpoint(tmp_path, SMALL["gr00t_n17"], seed=0)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "Gr00tN1d7"
    assert json.loads((tmp_path / BACKBONE_FILE).read_text())["model_type"] == "qwen3_vl"
    (tmp_path / BACKBONE_FILE).unlink()
    write_checkpoint(tmp_path, SMALL["minicpm_robot"], seed=0)
    robot = MiniCPMRobotConfig.from_folder(tmp_path)
    assert (robot.text.num_hidden_layers, robot.vision.insert_layer_id) == (4, 1)
    assert (robot.head.width, robot.head.state_dim, robot.head.num_layers) == (48, 12, 4)
    write_checkpoint(tmp_path, SMALL["cosmos3"], seed=0)
    world = Cosmos3Config.from_folder(tmp_path)
    assert (world.num_hidden_layers, world.q_size, world.patch_values) == (2, 128, 32)
    assert VAEConfig.from_folder(tmp_path / "vae").z_dim == 8


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_named_distinct_and_reproducible(name: str, tmp_path: Path) -> None:
    sizes = SMALL[name]
    write_checkpoint(tmp_path, sizes, seed=5)
    stored = {}
    for path, names in weight_files(sizes).items():
        held = load_file(tmp_path / path)
        assert held.keys() == {place(name)[1] for name in names}
        stored.update({name: held[place(name)[1]] for name in names})
    assert stored.keys() == dict(sizes.tensors()).keys()
    for key, tensor in stored.items():
        mean, std = sizes.moments(key, tuple(tensor.shape))
        assert torch.equal(tensor, draw(key, tuple(tensor.shape), (mean, std), 5)), key
        assert float(tensor.float().sub(mean).std()) == pytest.approx(std, rel=0.6), key
    shapes: dict[torch.Size, list[torch.Tensor]] = {}
    for tensor in stored.values():
        shapes.setdefault(tensor.shape, []).append(tensor)
    for same in shapes.values():
        for a, b in itertools.combinations(same, 2):
            assert not torch.equal(a, b)


def test_another_seed_gives_other_weights() -> None:
    assert not torch.equal(draw("a", (64,), (0.0, 1.0), 5), draw("a", (64,), (0.0, 1.0), 6))


def test_chunks_of_a_large_tensor_differ() -> None:
    halves = draw("a.weight", (2, 2**20), (0.0, 1.0), 0)
    assert not torch.equal(halves[0], halves[1])


def test_cache_is_filled_once_and_keyed_by_model_seed_and_sizes(tmp_path: Path) -> None:
    said: list[str] = []
    first = cached_checkpoint(tmp_path, "pi05", small_pi(), 0, said.append)
    assert cached_checkpoint(tmp_path, "pi05", small_pi(), 0, said.append) == first
    assert len(said) == 1
    others = [
        cached_checkpoint(tmp_path, "pi05", small_pi(), 1, said.append),
        cached_checkpoint(tmp_path, "pi0", small_pi("pi0"), 0, said.append),
    ]
    assert len({first, *others}) == 3
    assert all(not path.name.startswith(".writing") for path in tmp_path.iterdir())


@pytest.mark.parametrize("name", MODELS)
def test_requests_are_valid_distinct_and_of_the_size_asked_for(name: str, tmp_path: Path) -> None:
    inputs = SMALL[name].inputs(2, 7, 3, torch.Generator().manual_seed(1))
    path = tmp_path / "inputs.safetensors"
    save_file(inputs, path)
    positions = SMALL[name].positions(2, 7)
    if name == "gr00t_n17":
        batch = GrootBatch.from_file(path, 4)
        assert batch.positions == positions == batch.input_ids.shape[1]
        images = batch.input_ids == 261
        assert images.sum(1).tolist() == [2 * 64] * 3
        assert batch.pixel_values.shape == (3 * 2 * 256, 1536)
        assert batch.image_grid_thw.tolist() == [[1, 16, 16]] * 6
        frames = batch.pixel_values.view(-1, 3, 2, 256)
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        assert batch.embodiment_id.tolist() == [2, 3, 4]
        assert not torch.equal(batch.input_ids[0], batch.input_ids[1])
    elif name == "minicpm_robot":
        request = MiniCPMBatch.from_file(path, 4)
        assert request.positions == positions
        assert request.input_ids is not None
        assert (request.input_ids == 261).sum(1).tolist() == [2 * 64] * 3
        assert inputs["pixel_values"].shape == (1, 3, 14, 14 * 3 * 2 * 1024)
        assert inputs["target_sizes"].tolist() == [[32, 32]] * 6
        assert inputs["embodiment_id"].tolist() == [2, 3, 4]
        assert not torch.equal(request.input_ids[0], request.input_ids[1])
    elif name in ("cosmos3", "cosmos3_policy"):
        media = CosmosBatch.from_file(path, 4)
        assert media.positions == positions == 7 + 10
        assert media.latents.shape == (3, 8, 9, 8, 20)
        assert not torch.equal(media.neg_input_ids[0], media.neg_input_ids[1])
        if media.image is not None:
            assert media.image.shape == (3, 128, 320, 3)
        assert (media.image is None) == (media.domain_id is None) == (name == "cosmos3")
    else:
        plain = PiBatch.from_file(path, 10)
        assert plain.unpadded
        assert plain.images.shape[1] * 16 + plain.tokens.shape[1] == positions
        assert (plain.state is None) == (name == "pi05")
    assert inputs["noise"].shape[0] == 3


# ------------------------------------------------------------ our side and the peers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pi05", "pi0"])
def test_our_side_measures_itself_padded_and_unpadded(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL[name], seed=0)
    worker = shlex.join([sys.executable, "-m", "benchmarks.peers.worker", "phyai"])
    saved = tmp_path / "report.json"

    def steady(threads: int) -> Probe:
        return lambda: {"matrix_flops_per_s": 1.0}

    code = paired.run(
        ["--model", name, "--peer", f"command:{worker}", "--checkpoint", str(tmp_path),
         "--dtype", "fp32", "--cameras", "2", "--tokens", "5", "--peer-cameras", "3",
         "--peer-tokens", "9", "--pairs", "2", "--threads", "1", "--foreign-limit", "99",
         "--weights-cache", str(tmp_path), "--save", str(saved)],
        steady,
    )  # fmt: skip
    assert code == 0
    found = json.loads(saved.read_text())
    assert 0 <= found["equality"]["relative"] < 1e-5
    assert found["ours"]["threads"] == 1
    assert found["result"]["ours_stages_s"].keys() == {"vision", "prefix", "loop"}
    assert found["ours"]["peak_rss_bytes"] > 2**26
    assert found["ours"]["prefix_positions"] == 2 * 16 + 5
    assert found["request"]["model"] == name


def needs_environment(name: str, peer: str) -> None:
    environment = MODELS[name].environments.get(peer, sides.ENVIRONMENTS[peer])
    if not (ROOT / ".peers" / environment).is_dir():
        pytest.skip(f"needs: python benchmarks/paired.py --setup {environment}")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_our_side_computes_what_the_official_wiring_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_environment(name, MODELS[name].first_peer)
    write_checkpoint(tmp_path, SMALL[name], seed=0)
    rows = "1" if name.startswith("cosmos3") else "2"  # its pipeline takes one
    saved = tmp_path / "report.json"
    words = ["--model", name, "--checkpoint", str(tmp_path), "--dtype", "fp32", "--threads", "1",
             "--cameras", "2", "--tokens", "7", "--rows", rows, "--pairs", "1",
             "--foreign-limit", "99", "--weights-cache", str(tmp_path),
             "--save", str(saved)]  # fmt: skip
    code = paired.run(words, lambda threads: lambda: {"matrix_flops_per_s": 1.0})
    assert code == 0, capsys.readouterr().err
    found = json.loads(saved.read_text())
    assert found["equality"]["relative"] < 1e-5
    assert found["equality"]["moved"] > 0.1
    positions = SMALL[name].positions(2, 7)
    assert found["ours"]["prefix_positions"] == found["peer"]["prefix_positions"] == positions
    stages = STAGES.get(name, (USUAL_STAGES, USUAL_STAGES))
    for side, names in zip(("ours", "peer"), stages, strict=True):
        assert found["result"][f"{side}_stages_s"].keys() == names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "peer"),
    [
        ("pi05", "hf"),
        ("pi05", "hf-bf16-vision"),
        ("pi05", "openvino"),
        ("pi0", "hf"),
        ("pi0", "hf-bf16-vision"),
    ],
)
def test_peer_reproduces_the_golden_actions(
    name: str, peer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_environment(name, peer)
    golden = GOLDEN / name
    # OpenVINO compiles a graph per case, and float32 alone runs on every CPU.
    pattern = "case_b3_c3_s4.*" if peer == "openvino" else "*"
    for file in (*golden.glob("*.json"), golden / "model.safetensors", *golden.glob(pattern)):
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    code = paired.run(
        ["--model", name, "--peer", peer, "--verify-golden", str(tmp_path), "--threads", "1"]
    )
    assert code == 0, capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["hf", "hf-kv-cache"])
def test_gr00t_peer_reproduces_the_golden_actions(
    peer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_environment("gr00t_n17", peer)
    words = ["--model", "gr00t_n17", "--peer", peer, "--threads", "1"]
    code = paired.run([*words, "--verify-golden", str(GROOT_GOLDEN)])
    said = capsys.readouterr().out
    assert code == 0, said
    assert said.count(" fp32: ") == said.count(" bf16: ") >= 4


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["hf", "hf-sdpa"])
def test_minicpm_peer_reproduces_the_golden_tensors(
    peer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_environment("minicpm_robot", peer)
    words = ["--model", "minicpm_robot", "--peer", peer, "--threads", "1"]
    code = paired.run([*words, "--verify-golden", str(MINICPM_GOLDEN)])
    said = capsys.readouterr().out
    assert code == 0, said
    for case in ("case_vlm", "case_action", "case_action_b3", "case_e2e"):
        assert f"{case}.safetensors fp32: largest difference" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cases"),
    [("cosmos3_policy", ["case_pipe_act_policy"]), ("cosmos3", ["case_pipe_t2i", "case_pipe_t2v"])],
)
def test_cosmos_peer_reproduces_the_golden_runs(
    name: str, cases: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    needs_environment(name, "diffusers")
    words = ["--model", name, "--verify-golden", str(COSMOS_GOLDEN), "--threads", "1"]
    code = paired.run(words)
    said = capsys.readouterr().out
    assert code == 0, said
    for case in cases:
        assert f"{case}.safetensors fp32: largest difference" in said


def test_golden_cases_of_cosmos_are_whole_runs_of_the_pipeline() -> None:
    found = {
        name: sorted(
            path.stem
            for path in COSMOS_GOLDEN.glob(MODELS[name].golden_files)
            if MODELS[name].golden_cases(path)
        )
        for name in ("cosmos3_policy", "cosmos3")
    }
    assert found["cosmos3_policy"] == ["case_pipe_act_policy"]
    assert found["cosmos3"] == ["case_pipe_t2i", "case_pipe_t2v"]


def test_golden_cases_of_minicpm_are_told_by_what_they_hold() -> None:
    kinds = {
        path.stem: [(case.dtype, case.limit) for case in MODELS["minicpm_robot"].golden_cases(path)]
        for path in MINICPM_GOLDEN.glob(MODELS["minicpm_robot"].golden_files)
    }
    assert kinds.pop("case_vlm") == [("fp32", 2e-4)]
    assert kinds.pop("case_e2e") == [("fp32", 2e-4)]
    for name in ("case_action", "case_action_b3"):
        assert kinds.pop(name) == [("fp32", 2e-5)]
    assert kinds  # pieces of the network, which no peer runs alone
    assert not any(kinds.values())
