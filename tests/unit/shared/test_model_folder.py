"""What `model` may name, and a folder that is not whole: it is refused by the file that is wrong,
before it is loaded. What is known of a model by its configuration: its experts, and the dtype that
"auto" means."""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from shared.errors import BadRequest
from shared.weights.architectures import (
    ARCHITECTURES,
    TRIED,
    Experts,
    cannot_reload_on_cpu,
    choose_dtype,
    experts_of,
    untested_warning,
)
from shared.weights.model_folder import check_model_folder, check_rope, model_folder, plain_shapes
from tests.support.model_folders import CONFIG, make_model_folder, shapes
from tests.support.safetensors_files import safetensors

WEIGHTS = "model.safetensors"


def configured(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(CONFIG | changes))

    return change


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file(found, folder / WEIGHTS)

    return rewrite


def cut(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:-10])


def lengthened(folder: Path) -> None:
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole + b"0123")


def in_shards(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    placed = dict.fromkeys(shapes(), "model-00001-of-00002.safetensors")
    placed["lm_head.weight"] = "model-00002-of-00002.safetensors"
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": placed}))


def test_a_whole_folder_is_taken(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", window=64)
    check_model_folder(folder, max_model_len=64)
    stored = {name: shape for name, shape in shapes().items() if not name.endswith("bias")}
    assert plain_shapes(CONFIG) == stored


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (cut, "model.safetensors' is not a whole safetensors file: tensor "),
        (lengthened, "model.safetensors': it has "),
        (
            tensors(lambda found: found.pop("model.layers.1.mlp.up_proj.weight")),
            "config.json': it names a tensor 'model.layers.1.mlp.up_proj.weight', which no file",
        ),
        (
            tensors(lambda found: found.update({"lm_head.weight": numpy.zeros((23, 16))})),
            "model.safetensors': tensor 'lm_head.weight' has the shape [23, 16], and by "
            "config.json it has [24, 16]",
        ),
        (configured(num_hidden_layers=1), "its num_hidden_layers is 1"),
        (configured(architectures=[]), "config.json': it names no architecture"),
        (configured(architectures=["BertForTokenClassification"]), "is not a language model that"),
        (configured(quantization_config={}), "quantized weights cannot be trained"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "cannot be read as JSON: "),
        (in_shards, "it names 'model-00002-of-00002.safetensors', which is not in the folder"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(
    tmp_path: Path, spoil: Callable[[Path], Any], sentence: str
) -> None:
    folder = make_model_folder(tmp_path / "model")
    spoil(folder)
    with pytest.raises(BadRequest) as raised:
        check_model_folder(folder)
    assert raised.value.detail.startswith("'model': ") and sentence in raised.value.detail


def test_more_tokens_than_the_model_holds_are_refused(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path / "model", window=64)
    with pytest.raises(BadRequest, match=r"'max_model_len' is 65, and .* holds 64 tokens"):
        check_model_folder(folder, max_model_len=65)
    stretched = {"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4}}
    configured(**stretched)(folder)
    check_model_folder(folder, max_model_len=256)


LONG = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
PHI = {"max_position_embeddings": 64, "original_max_position_embeddings": 8, "rope_scaling": LONG}
NTK = {
    "max_position_embeddings": 8,
    "rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}},
}


@pytest.mark.parametrize(
    ("config", "max_model_len", "said"),
    [
        (PHI, None, r"no 'max_model_len', and the model 'phi' has RoPE of type 'longrope'"),
        (
            PHI,
            9,
            r"'max_model_len' is 9, .* up to 8 tokens only \(original_max_position_embeddings",
        ),
        ({"text_config": PHI}, 9, "expected max_model_len = 8 or less"),
        (NTK, None, r"'dynamic', .* up to 8 tokens only \(max_position_embeddings"),
        (NTK, 9, "'max_model_len' is 9"),
    ],
)
def test_sequences_beyond_what_rope_is_fixed_for_are_refused(
    config: dict[str, Any], max_model_len: int | None, said: str
) -> None:
    with pytest.raises(BadRequest, match=said):
        check_rope("phi", config, max_model_len)


@pytest.mark.parametrize(
    ("config", "max_model_len"),
    [
        (PHI, 8),
        (PHI | {"max_position_embeddings": 8}, None),
        (NTK, 8),
        ({"max_position_embeddings": 8, "rope_scaling": {"type": "dynamic", "alpha": 9.0}}, None),
        ({"max_position_embeddings": 8, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 32),
        ({"max_position_embeddings": 8, "rope_scaling": None}, None),
    ],
)
def test_sequences_that_rope_is_fixed_for_are_taken(
    config: dict[str, Any], max_model_len: int | None
) -> None:
    check_rope("phi", config, max_model_len)


def listed(module: str, path: str, *names: str) -> dict[str, Any]:
    """Returns the values of dicts and of lists of pairs of these names, without importing them."""
    found = importlib.util.find_spec(module)
    assert found and found.origin
    nodes: dict[str, ast.expr] = {}
    for node in ast.walk(ast.parse((Path(found.origin).parent / path).read_text())):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            nodes[getattr(target, "id", "")] = node.value
    keys: dict[str, Any] = {}
    for name in names:
        node = nodes[name]
        if isinstance(node, ast.Dict):
            keys |= {key.value: None for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Call):
            keys |= dict(ast.literal_eval(node.args[0]))
    return keys


def test_the_architectures_are_those_of_the_pinned_libraries() -> None:
    path = "models/auto/modeling_auto.py"
    causal = listed("transformers", path, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").values()
    ours = {name for each in causal for name in ([each] if isinstance(each, str) else each)}
    assert ours >= ARCHITECTURES
    tables = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
    theirs = listed("vllm", "model_executor/models/registry.py", *tables)
    assert ours & set(theirs) <= ARCHITECTURES


def test_a_folder_with_a_model_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(safetensors(w=b"weights"))
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_folder_whose_weights_are_garbage_is_refused_by_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"garbage" * 100)
    with pytest.raises(BadRequest) as raised:
        model_folder(str(tmp_path))
    assert raised.value.detail.startswith(
        f"'model': '{tmp_path}/model.safetensors' is not a whole safetensors file: its header would"
    )


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "01-ai/Yi-6B"])
def test_a_hugging_face_id_is_left_to_the_hub(model: str) -> None:
    assert model_folder(model) is None


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./missing", "../missing", "~/model", "a/b/c", "a b", "a/", "/a"]
)
def test_what_is_neither_is_refused_by_name(model: str) -> None:
    with pytest.raises(BadRequest) as raised:
        model_folder(model)
    assert raised.value.detail.startswith(f"'model': there is no folder {model!r} here; expected")


def test_a_name_that_no_file_may_have_is_refused() -> None:
    with pytest.raises(
        BadRequest, match=r"^'model': 'aaa.*: File name too long; expected a folder"
    ):
        model_folder("a" * 300)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"has no config\.json"):
        model_folder(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadRequest, match=r"has no \*\.safetensors"):
        model_folder(str(tmp_path))
    with pytest.raises(BadRequest, match="is a file"):
        model_folder(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("capability", "cpu", "dtype"),
    [
        ((7, 0), True, "float32"),  # V100, in a host whose CPU multiplies bfloat16
        ((7, 5), True, "float32"),  # T4
        ((8, 0), False, "bfloat16"),  # A100
        ((9, 0), False, "bfloat16"),  # H100
        ((10, 0), False, "bfloat16"),  # B200
        (None, True, "bfloat16"),
        (None, False, "float32"),
    ],
)
def test_auto_is_bfloat16_only_where_the_hardware_multiplies_it(capability, cpu, dtype):
    assert choose_dtype("auto", capability=capability, cpu_multiplies_bfloat16=cpu) == dtype


def test_a_dtype_that_was_asked_for_by_name_is_taken():
    asked = choose_dtype("float32", capability=(9, 0), cpu_multiplies_bfloat16=True)
    assert asked == "float32"


MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 100}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"intermediate_size": 100}, None),
        ({"num_experts": None, "intermediate_size": 100}, None),
        ({"num_experts": 8, "enable_moe_block": False}, None),
        (MIXTRAL, Experts(8, 2, 100)),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
            | {"shared_expert_intermediate_size": 30, "intermediate_size": 100},
            Experts(8, 2, 10, 30),
        ),
        (
            {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 10}
            | {"n_shared_experts": 2},
            Experts(64, 6, 10, 20),
        ),
    ],
)
def test_what_a_configuration_says_of_experts(config, expected) -> None:
    assert experts_of(config) == expected


def test_how_many_a_token_goes_to_is_not_guessed() -> None:
    with pytest.raises(KeyError, match="num_experts_per_tok"):
        experts_of({"num_experts": 8, "intermediate_size": 100})


def test_a_mixture_of_experts_that_was_not_tried_is_a_warning() -> None:
    assert untested_warning("m", {"architectures": ["Qwen2ForCausalLM"]}) is None
    assert untested_warning("m", MIXTRAL | {"architectures": [TRIED[0]]}) is None
    said = untested_warning("m", MIXTRAL | {"architectures": ["OlmoeForCausalLM"]})
    assert said is not None
    assert said.startswith(
        "the model 'm' is a mixture of experts of the architecture 'OlmoeForCausalLM', which was "
        "not tested; tested were MixtralForCausalLM and Qwen3MoeForCausalLM"
    )


def test_on_a_cpu_experts_are_exchanged_by_a_new_engine_alone() -> None:
    assert cannot_reload_on_cpu(MIXTRAL, "restart") is None
    assert cannot_reload_on_cpu({"intermediate_size": 8}, "auto") is None
    for config in (MIXTRAL, {"text_config": MIXTRAL}):
        said = cannot_reload_on_cpu(config, "auto")
        assert said is not None and 'weight_sync is "auto", and only "restart" works' in said
