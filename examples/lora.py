"""LoRA: train adapters for any model, whose weights do not change (arXiv:2106.09685).

    python examples/lora.py --data TEXT.txt --adapter DIR [--model FILE.gguf]
    python examples/lora.py --data DIALOGUES.jsonl --adapter DIR --model FILE.gguf
    python examples/lora.py --adapter DIR --out tuned.gguf [--type Q4_0] [--model FILE.gguf]

A frozen matrix W, which may stay quantised, gets two small matrices A and B that are trained:
y = x W^T + alpha / r * x A^T B^T. DIR has PEFT's format: each reads what the other writes.

A line of DIALOGUES.jsonl is {"messages": [...], "tools": [...]} as in OpenAI's API, tools if there
are any. The chat template writes them; only what the assistant says is learned, and not where a
message has "weight": 0, as in OpenAI's data.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
try:
    import torch
    import torch.nn.functional as F
    from safetensors import SafetensorError
    from safetensors.torch import load_file, save
    from save import SAVE_TYPES, replacing, save_gguf
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    import llama2
except ImportError as error:
    print(f"lora.py: {error.name} is missing: pip install {error.name}", file=sys.stderr)
    sys.exit(2)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LENGTH, BATCH = 256, 4  # tokens of a sequence, sequences of a training step
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
    model.lora_settings = {"r": r, "lora_alpha": alpha}
    for name, module in [*model.named_modules()]:
        if name.endswith(PROJECTIONS) and name.endswith(tuple(names)):
            module.lora_A = nn.Linear(module.in_features, r, bias=False)
            module.lora_B = nn.Linear(r, module.out_features, bias=False)
            module.lora_scale = alpha / r
            nn.init.zeros_(module.lora_B.weight)  # nothing changes before the first step
            module.register_forward_hook(add_product)


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
    """Write PEFT's two files."""
    tensors = {name: w.reshape(-1, w.shape[-1]) for name, w in peft_views(model).items()}
    targets = sorted({name.split(".")[-3] for name in tensors})
    settings = {name: values[0] for name, values in USUAL.items()} | model.lora_settings
    settings["target_modules"] = targets
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "adapter_model.safetensors", overwrite=True) as file:
        file.write(save(tensors, {"format": "pt"}))
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))


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


def loss_of(model: llama2.Llama, tokens: Tensor, learned: Tensor | None = None) -> Tensor:
    """Cross-entropy of the tokens (n,), or of those that `learned` (n,) marks; none is the first.

    To save memory, backward() computes blocks again.
    """
    T = len(tokens) - 1
    cos, sin = llama2.rope_tables(model.config, T)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    x = model.embed_tokens(tokens[None, :-1])  # (1, T, C)
    for block in model.layers:
        x = checkpoint(block, x, cos, sin, mask, None, use_reentrant=False)
    x, tokens = x[0], tokens[1:]
    if learned is not None:
        x, tokens = x[learned[1:]], tokens[learned[1:]]
    return F.cross_entropy(model.lm_head(model.norm(x)), tokens)


def read_text(path: Path, tokenizer: llama2.Tokenizer) -> tuple[list, list]:
    """Arguments of loss_of(): sequences from each position of nine tenths of a text, and up to 8 of
    the rest."""
    ids = tokenizer.encode(path.read_text("utf-8"))
    if len(ids) < 10 * (LENGTH + 1):
        raise ValueError(f"the text has {len(ids)} tokens; expected {10 * (LENGTH + 1)} or more")
    sequences = torch.tensor(ids).unfold(0, LENGTH + 1, 1)
    last = len(ids) * 9 // 10
    return [(s,) for s in sequences[: last - LENGTH]], [(s,) for s in sequences[last::LENGTH][:8]]


def read_dialogues(path: Path, tokenizer: llama2.Tokenizer, template: str | None) -> tuple:
    """The same of JSON lines {"messages": [...], "tools": [...]}: what the assistant says is learned."""
    source = template or tokenizer.chat_template
    source = llama2.CHAT_TEMPLATES.get(source, source)
    unprompted = f"{{% set add_generation_prompt = false %}}{source}"
    samples = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            dialogue = json.loads(line)
            messages, tools = dialogue["messages"], dialogue.get("tools")
            calls = [call for message in messages for call in message.get("tool_calls") or ()]
            for function in (call["function"] for call in calls):
                if isinstance(function["arguments"], str):  # as OpenAI's API has them
                    function["arguments"] = json.loads(function["arguments"])
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            answers = [i for i in answers if messages[i].pop("weight", 1)]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} is no dialogue: {error!r:.99}") from error
        longer = torch.empty(0)
        for i in answers[::-1]:
            before = llama2.encode_chat(tokenizer, messages[:i], source, tools=tools)
            ids = llama2.encode_chat(tokenizer, messages[: i + 1], unprompted, tools=tools)
            start = [*(a == b for a, b in zip(before, ids, strict=False)), False].index(False)
            tokens = torch.tensor(ids)
            if not torch.equal(longer[: len(ids)], tokens):  # templates may leave out what is past
                longer = tokens
                samples.append((tokens, torch.zeros_like(tokens, dtype=torch.bool)))
            samples[-1][1][max(1, start) : len(ids)] = True
    if len(samples) < 10:
        raise ValueError(f"there are {len(samples)} dialogues; expected 10 or more")
    last = len(samples) * 9 // 10
    return samples[:last], samples[last:][:8]


def train(model: llama2.Llama, samples: list, held_out: list, steps: int, rate: float) -> None:
    """Train the adapters; show the loss on what is held out."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    start = time.perf_counter()
    for step in range(steps + 1):
        if step % max(1, steps // 10) == 0:
            with torch.no_grad():
                loss = torch.stack([loss_of(model, *sample) for sample in held_out]).mean()
            if not loss.isfinite():
                raise ValueError(f"the loss is {loss} after {step} steps; try a lower --rate")
        left = (time.perf_counter() - start) / max(1, step) * (steps - step)
        text = f"{'#' * (30 * step // steps):30}] {step} of {steps}, {left:.0f} s left"
        text = f"{text if step else text.partition(',')[0]}, held-out loss {loss:.3f}"
        print(f"\r[{text:75}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
        if step < steps:
            for i in torch.randint(len(samples), (BATCH,)).tolist():
                (loss_of(model, *samples[i]) / BATCH).backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    parser = llama2.Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=llama2.DEFAULT_MODEL, help="what llama2.load() reads")
    parser.add_argument(
        "--data", metavar="FILE", type=Path, help="a text, or JSON lines of messages (.jsonl)"
    )
    parser.add_argument("--chat-template", metavar="NAME|FILE", help="default: the model's")
    parser.add_argument("--adapter", metavar="DIR", type=Path, help="is read if it exists, written")
    parser.add_argument("--out", metavar="FILE.gguf", type=Path, help="write the merged model")
    parser.add_argument("--type", choices=SAVE_TYPES, default="Q8_0")
    parser.add_argument("--targets", nargs="+", choices=PROJECTIONS, default=["q_proj", "v_proj"])
    numbers = {
        "rank": (8, llama2.in_range(int, 1)),
        "alpha": (16.0, llama2.in_range(float, 1e-6, 1e6)),
        "steps": (200, llama2.in_range(int, 1)),
        "rate": (1e-3, llama2.in_range(float, 1e-9, 1)),
    }
    for name, (value, number) in numbers.items():
        parser.add_argument(f"--{name}", type=number, default=value, help=f"default: {value}")
    args = parser.parse_args()
    status = 0
    if not (args.adapter or (args.data and args.out)) or (args.out and args.out.exists()):
        parser.error("expected --adapter, or --data and a new file as --out")
    if args.out and not args.out.parent.is_dir():  # else only noticed after training
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    try:
        model, tokenizer = llama2.load(args.model)
        if args.adapter and (args.adapter.exists() or not args.data):
            load_adapter(model, args.adapter)
        else:
            add_adapters(model, args.targets, args.rank, args.alpha)
        if args.data:
            template = args.chat_template
            if template and template not in llama2.CHAT_TEMPLATES:
                with llama2.naming(Path(template)):
                    template = Path(template).read_text("utf-8")
            with llama2.naming(args.data):
                if args.data.suffix == ".jsonl":
                    samples = read_dialogues(args.data, tokenizer, template)
                else:
                    samples = read_text(args.data, tokenizer)
            try:
                train(model, *samples, args.steps, args.rate)
            except KeyboardInterrupt:
                status = 130
                print("\ninterrupted: what was learned until now is kept", file=sys.stderr)
        if args.data and args.adapter:
            save_adapter(model, args.adapter)
        if args.out:
            merge_adapters(model)
            save_gguf(model, args.out, args.type, tokenizer=tokenizer)
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))
    sys.exit(status)
