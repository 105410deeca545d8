"""LoRA adapters in PEFT's format: add, merge, save and load them. examples/lora.py trains them.

    model, tokenizer = llama2.load("FILE.gguf")
    adapters.load_adapter(model, Path("DIR"))  # that PEFT or examples/lora.py wrote

A frozen matrix W, which may stay quantised, gets two small matrices A and B (arXiv:2106.09685):
y = x W^T + alpha / r * x A^T B^T.
"""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from save import replacing
from torch import Tensor, nn

import llama2

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT = "base_model.model.model."  # the prefix of PEFT's names
# PEFT's settings that do not change the output. All others must be empty or one of USUAL: no DoRA.
SILENT = """r lora_alpha target_modules task_type base_model_name_or_path revision inference_mode
    lora_dropout layers_to_transform layers_pattern exclude_modules auto_mapping peft_version
    megatron_core qalora_group_size"""
USUAL = {
    "peft_type": ["LORA"],
    "bias": ["none"],
    "init_lora_weights": [True, "gaussian", "orthogonal", "eva"],  # pissa, olora, ... change W, too
}


def add_adapters(model: llama2.Llama, names: list[str], r: int, alpha: float) -> None:
    """Add A and B to the projections with these names: q_proj, or layers.0.self_attn.q_proj."""
    targets = set()
    for name, module in [*model.named_modules()]:
        if name.endswith(PROJECTIONS) and name.endswith(tuple(names)):
            targets.add(name.rpartition(".")[2])
            module.lora_A = nn.Linear(module.in_features, r, bias=False)
            module.lora_B = nn.Linear(r, module.out_features, bias=False)
            module.lora_scale = alpha / r
            nn.init.zeros_(module.lora_B.weight)  # nothing changes before the first step
            module.register_forward_hook(add_product)
    model.lora_settings = {"r": r, "lora_alpha": alpha, "target_modules": sorted(targets)}


def add_product(module: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor:
    """A forward hook: add the product of the input with A and B to a projection's output."""
    return y + module.lora_scale * module.lora_B(module.lora_A(inputs[0]))


def merge_adapters(model: llama2.Llama) -> None:
    """Replace each projection that has an adapter by one dense layer."""
    for name, module in [*model.named_modules()]:
        if hasattr(module, "lora_A"):
            product = module.lora_B.weight @ module.lora_A.weight
            merged = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            merged.weight = nn.Parameter(
                (module.weight.float() + module.lora_scale * product).detach()
            )
            model.set_submodule(name, merged)


def peft_views(model: llama2.Llama) -> dict[str, Tensor]:
    """All A and B by PEFT's names. The rows of a head are (D/2, 2) here, but (2, D/2) in PEFT."""
    views = {PEFT + name: w for name, w in model.state_dict().items() if ".lora_" in name}
    for name, w in views.items():
        if name.endswith(("q_proj.lora_B.weight", "k_proj.lora_B.weight")):
            views[name] = w.unflatten(0, (-1, model.config.head_dim // 2, 2)).transpose(1, 2)
    return views


def save_adapter(model: llama2.Llama, folder: Path) -> None:
    """Write PEFT's two files, or neither."""
    tensors = {name: w.reshape(-1, w.shape[-1]) for name, w in peft_views(model).items()}
    settings = {name: values[0] for name, values in USUAL.items()} | model.lora_settings
    folder.mkdir(parents=True, exist_ok=True)
    # Both are on the disk before the first of them takes its name.
    with (
        replacing(folder / "adapter_config.json", overwrite=True) as config,
        replacing(folder / "adapter_model.safetensors", overwrite=True) as weights,
    ):
        config.write(json.dumps(settings, indent=2).encode())
        config.flush()
        weights.write(save(tensors, {"format": "pt"}))


def load_adapter(model: llama2.Llama, folder: Path) -> None:
    """Add PEFT's adapter. Raises ValueError if it does not fit."""
    try:
        settings = json.loads((folder / "adapter_config.json").read_text("utf-8"))
        unsupported = {
            key: value
            for key, value in settings.items()
            if value and key not in SILENT.split() and value not in USUAL.get(key, [])
        }
        r, alpha = settings.get("r"), settings.get("lora_alpha")
        tensors = load_file(folder / "adapter_model.safetensors")
    except (ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"{folder}: the adapter is damaged: {str(error)[:300]!a}") from error
    for key, value in unsupported.items():
        raise ValueError(f"{folder}: {key!a:.60} is {value!a:.60}, which is not supported")
    sizes = {len(w) for name, w in tensors.items() if name.endswith("lora_A.weight") and w.ndim}
    fits = [*sizes] == [r] and type(r) is int
    if not fits or type(alpha) not in (int, float) or not abs(alpha) < 1e6:
        problem = f"r is {r!r:.60} and lora_alpha {alpha!r:.60}; the matrices have r {sizes}"
        raise ValueError(f"{folder}: {problem}")
    names = [name.removeprefix(PEFT).partition(".lora_")[0] for name in tensors]
    add_adapters(model, names, r, alpha)
    views = peft_views(model)
    for name in sorted(views.keys() ^ tensors.keys()):
        raise ValueError(f"{folder}: {name!a:.99} is missing, or has no place in this model")
    for name, view in views.items():
        if tensors[name].numel() != view.numel():
            raise ValueError(f"{folder}: {name} is {[*tensors[name].shape]}, which does not fit")
        view.copy_(tensors[name].view_as(view))
