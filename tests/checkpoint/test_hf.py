"""Export of checkpoints to the layout of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from anabranch.checkpoint.hf import LLAMA3_ROPE, dropout_of, export_hf, import_hf
from anabranch.config import DataSection
from anabranch.data.tokenizers import TextTokenizer, write_tokenizer
from anabranch.errors import ConfigError, UserError
from anabranch.train.model.interface import build, initial_weights
from anabranch.train.model.layout import Layout
from anabranch.train.model.linear import PlainWeights
from anabranch.train.model.sizes import ModelConfig, named_size
from anabranch.train.reference.generate import generate

#: The largest logit difference that is allowed at initial scale.
TOLERANCE = 1e-5
CPU = torch.device("cpu")
LLAMA = replace(named_size("llama-tiny"), vocab_size=300, rope_theta=50_000.0, norm_eps=1e-6)
GPT = replace(named_size("gpt-tiny"), vocab_size=300, norm_eps=1e-6)
MODELS = [replace(model, tied=tied) for model in (LLAMA, GPT) for tied in (True, False)]
NAMES = ["llama-tied", "llama-untied", "gpt-tied", "gpt-untied"]
#: Exported as the dense models with the same logits.
SUBSPACE = [replace(model, tied=False, subspace=16) for model in (LLAMA, GPT)]
TEXT = "def flow(river):\n    return größer ✓\n"


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    write_tokenizer(DataSection(tokenizer="bpe", vocab_size=300), [TEXT * 50], path)
    return path


def seeded_weights(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Initial weights as views of one flat vector, as a stage holds them; no gain is 1 and no bias 0."""
    model = build(config, CPU, dtype)
    shapes = model.end_shapes()
    for block in range(config.blocks):
        shapes.update(model.block_shapes(block))
    layout = Layout(shapes)
    weights = dict(layout.views(initial_weights(model, layout, 3, dtype)))
    generator = torch.Generator().manual_seed(5)
    for tensor in weights.values():
        if tensor.dim() == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return weights


def random_ids(rows: int, sequence: int) -> Tensor:
    return torch.randint(0, 300, (rows, sequence), generator=torch.Generator().manual_seed(1))


def logits(config: ModelConfig, tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    model, weights = build(config, CPU, torch.float32), PlainWeights(tensors)
    x = model.embed(weights, ids)
    for block in range(config.blocks):
        x = model.block(weights, block, x)
    return model.head(weights, x)


@pytest.mark.costly(stay=1)
@pytest.mark.parametrize(
    "config", [*MODELS, *SUBSPACE], ids=[*NAMES, "llama-subspace", "gpt-subspace"]
)
def test_an_exported_folder_loads_in_transformers_with_the_same_logits(
    config: ModelConfig, tokenizer_json: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    weights = seeded_weights(config)
    export_hf(weights, config, tokenizer_json, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1

    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(tmp_path / "out", output_loading_info=True)
    assert not any(report.values()), report
    expected_class = "LlamaForCausalLM" if config.architecture == "llama" else "GPT2LMHeadModel"
    assert type(model).__name__ == expected_class
    ids = random_ids(3, config.max_sequence)
    with torch.no_grad():
        theirs = model.eval()(ids).logits
        ours = logits(config, weights, ids)
    assert ours.abs().max() > 0.5
    assert (theirs - ours).abs().max() <= TOLERANCE

    prompt = ids[0, :9]
    continued = model.generate(prompt[None], max_new_tokens=12, do_sample=False)[0, 9:].tolist()
    separator = TextTokenizer(tokenizer_json).separator
    ours = generate(weights, config, prompt.tolist(), 12, temperature=0, stop=separator)
    assert list(ours) == continued


@pytest.mark.parametrize("config", SUBSPACE, ids=["llama", "gpt"])
def test_a_subspace_model_is_exported_as_a_dense_one(
    config: ModelConfig, tokenizer_json: Path, tmp_path: Path
) -> None:
    """Without `transformers`: the folder read back has the same logits."""
    weights = seeded_weights(config)
    export_hf(weights, config, tokenizer_json, tmp_path / "out")
    dense, tensors = import_hf(tmp_path / "out")
    assert (dense.subspace, dense.tied) == (0, False)
    ids = random_ids(2, 20)
    assert (logits(dense, tensors, ids) - logits(config, weights, ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("architecture", ["llama", "gpt"])
def test_the_tokenizer_and_generation_config_load(
    architecture: str, tokenizer_json: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    config = LLAMA if architecture == "llama" else GPT
    export_hf(seeded_weights(config), config, tokenizer_json, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ours = TextTokenizer(tokenizer_json)
    assert theirs(TEXT)["input_ids"] == ours.encode(TEXT)
    assert theirs.decode(ours.encode(TEXT)) == TEXT
    assert (theirs.eos_token_id, theirs.model_max_length) == (ours.separator, config.max_sequence)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == generation.bos_token_id == ours.separator


@pytest.mark.parametrize("shards", ["1GB", "300KB"])
@pytest.mark.parametrize("config", MODELS, ids=NAMES)
def test_a_folder_saved_by_transformers_is_imported_with_the_same_logits(
    config: ModelConfig, shards: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    if config.architecture == "llama":
        hf = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=300, hidden_size=128, intermediate_size=352, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
                rms_norm_eps=1e-6, tie_word_embeddings=config.tied,
                # transformers 4 reads the first, transformers 5 the second
                rope_theta=5e4, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
            )
        )  # fmt: skip
    else:
        hf = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=300, n_embd=128, n_layer=3, n_head=4, n_positions=128, layer_norm_epsilon=1e-6,
                attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, tie_word_embeddings=config.tied,
            )
        )  # fmt: skip
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    hf.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards != "1GB")
    shape, tensors = import_hf(tmp_path)
    assert shape == config
    ids = random_ids(2, 100)
    with torch.no_grad():
        assert (hf.eval()(ids).logits - logits(shape, tensors, ids)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", MODELS, ids=NAMES)
def test_export_and_import_return_every_bit(
    config: ModelConfig, dtype: torch.dtype, tokenizer_json: Path, tmp_path: Path
) -> None:
    weights = seeded_weights(config, dtype)
    export_hf(weights, config, tokenizer_json, tmp_path / "out")
    shape, tensors = import_hf(tmp_path / "out")
    assert shape == config
    assert tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert tensors[name].dtype == dtype and tensors[name].is_contiguous()
        assert torch.equal(tensors[name], tensor)


def test_published_gpt2_names_and_buffers_are_understood(tokenizer_json: Path, tmp_path: Path) -> None:
    """The first published files lack the prefix and hold the causal mask."""
    config = replace(GPT, tied=True)
    weights = seeded_weights(config)
    export_hf(weights, config, tokenizer_json, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(tensors, path)
    _, imported = import_hf(tmp_path / "out")
    assert all(torch.equal(imported[name], tensor) for name, tensor in weights.items())


Edit = Callable[[dict[str, object]], None]


def setting(key: str, value: object) -> Edit:
    return lambda config: config.update({key: value})


def without(key: str) -> Edit:
    def edit(config: dict[str, object]) -> None:
        del config[key]

    return edit


@pytest.mark.parametrize(
    ("architecture", "edit", "words"),
    [
        ("gpt", setting("activation_function", "relu"), 'activation_function = "relu" cannot'),
        ("gpt", setting("scale_attn_by_inverse_layer_idx", True), "scale_attn_by_inverse_layer_idx = true"),
        ("gpt", setting("scale_attn_weights", False), "scale_attn_weights = false"),
        ("gpt", setting("reorder_and_upcast_attn", True), "reorder_and_upcast_attn"),
        ("gpt", setting("add_cross_attention", True), "add_cross_attention"),
        ("gpt", without("n_positions"), "lacks the key 'n_positions'"),
        ("gpt", setting("n_embd", "wide"), "wrong type"),
        ("llama", setting("attention_bias", True), "attention_bias = true cannot"),
        ("llama", setting("mlp_bias", True), "mlp_bias = true cannot"),
        ("llama", setting("hidden_act", "gelu"), 'hidden_act = "gelu" cannot'),
        ("llama", setting("rope_scaling", {"rope_type": "linear"}), "'default' and 'llama3' can"),
        (
            "llama",
            setting("rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}),
            "rope_scaling.low_freq_factor = 2.0 cannot be represented; only low_freq_factor = 1 can",
        ),
        (
            "llama",
            setting("rope_scaling", {"rope_type": "llama3", **LLAMA3_ROPE}),
            "rope_scaling lacks factor, which the kind 'llama3' needs",
        ),
        ("llama", setting("rope_scaling", {"rope_type": "llama3", "factor": 8.0}), "lacks low_freq_factor"),
        (
            "llama",
            setting("rope_scaling", {"rope_type": "llama3", **LLAMA3_ROPE, "factor": 0.5}),
            "rope_scaling.factor = 0.5; it must be at least 1",
        ),
        ("llama", setting("rope_scaling", [1, 2]), "rope_scaling is no object with keys"),
        ("llama", setting("rope_parameters", {"rope_type": "yarn"}), "rope_parameters.rope_type = 'yarn'"),
        (
            "llama",
            setting("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
            "rope_parameters.partial_rotary_factor = 0.5",
        ),
        ("llama", setting("head_dim", 64), "head_dim = 64 cannot"),
        ("llama", setting("quantization_config", {"bits": 4}), "quantization_config"),
        ("llama", setting("model_type", "mixtral"), "model_type = 'mixtral'"),
        ("llama", setting("model_type", ["llama"]), r"model_type = \['llama'\]"),
        ("llama", setting("num_attention_heads", 3), "head_dim = 32 cannot"),
        ("llama", setting("num_attention_heads", 0), "model.heads: 0 must be at least 1"),
        ("llama", setting("hidden_size", float("inf")), "wrong type: cannot convert float infinity"),
        ("llama", setting("rms_norm_eps", 10**400), "wrong type: int too large to convert"),
        ("llama", setting("num_key_value_heads", 3), "config.json: model.kv_heads"),
        ("llama", setting("intermediate_size", 350), r"mlp\..*has shape \((352, 128|128, 352)\), not"),
        ("llama", setting("num_hidden_layers", 4), "model.layers.3.* is missing"),
        ("llama", setting("num_hidden_layers", 2), "model.layers.2.* is not one of"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_its_key(
    architecture: str, edit: Edit, words: str, tokenizer_json: Path, tmp_path: Path
) -> None:
    config = LLAMA if architecture == "llama" else GPT
    export_hf(seeded_weights(config), config, tokenizer_json, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=words):
        import_hf(tmp_path / "out")


def test_dropout_is_told_and_not_applied(tokenizer_json: Path, tmp_path: Path) -> None:
    """GPT-2's published config.json leaves dropout at the library's default of 0.1."""
    export_hf(seeded_weights(GPT), GPT, tokenizer_json, tmp_path / "out")
    assert dropout_of(tmp_path / "out") == {}
    path = tmp_path / "out" / "config.json"
    content = json.loads(path.read_text())
    content["attn_pdrop"] = 0.2
    del content["resid_pdrop"]
    path.write_text(json.dumps(content))
    assert dropout_of(tmp_path / "out") == {"attn_pdrop": 0.2, "resid_pdrop": 0.1}
    shape, _ = import_hf(tmp_path / "out")
    assert shape == GPT


@pytest.mark.parametrize("parameters", ["rope_scaling", "rope_parameters"])
def test_llama_3_1_rope_scaling_gives_the_same_logits(parameters: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(2)
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 5e5,
    }  # fmt: skip
    hf = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=1,
            max_position_embeddings=512, rope_theta=5e5, **{parameters: scaling},
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter *= 5  # so that attention depends on positions
    hf.save_pretrained(tmp_path)
    shape, tensors = import_hf(tmp_path)
    assert (shape.rope_factor, shape.rope_theta) == (8.0, 5e5)
    ids = random_ids(1, 512)
    with torch.no_grad():
        theirs = hf.eval()(ids).logits
        assert (theirs - logits(shape, tensors, ids)).abs().max() <= 20 * TOLERANCE
        assert (theirs - logits(replace(shape, rope_factor=1.0), tensors, ids)).abs().max() > 100 * TOLERANCE


def test_rope_scaling_returns_from_an_export(tokenizer_json: Path, tmp_path: Path) -> None:
    stretched = replace(LLAMA, rope_factor=32.0)
    export_hf(seeded_weights(stretched), stretched, tokenizer_json, tmp_path / "out")
    assert import_hf(tmp_path / "out")[0] == stretched


def test_damaged_and_missing_files_are_named(tokenizer_json: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        import_hf(out)
    export_hf(seeded_weights(LLAMA), LLAMA, tokenizer_json, out)
    data = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        import_hf(out)
    (out / "model.safetensors").unlink()
    (out / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ConfigError, match=r"only safetensors are read"):
        import_hf(out)
    index = out / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ConfigError, match="outside the folder"):
        import_hf(out)
    (out / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json is damaged"):
        import_hf(out)


def test_an_export_never_overwrites_and_never_stays_half(tokenizer_json: Path, tmp_path: Path) -> None:
    weights = seeded_weights(LLAMA)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match="not an empty folder"):
        export_hf(weights, LLAMA, tokenizer_json, tmp_path / "used")
    with pytest.raises(ValueError, match=r"model.norm.weight is missing"):
        incomplete = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
        export_hf(incomplete, LLAMA, tokenizer_json, tmp_path / "out")
    with pytest.raises(ConfigError):
        export_hf(weights, LLAMA, tmp_path / "nowhere.json", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert (tmp_path / "used" / "thesis.txt").read_text() == "precious"
