"""Several devices: tensor parallelism by torch.distributed, one process for each device.

    torchrun --nproc-per-node 2 examples/ranks.py --prompt "Once upon a time"

The options are those of llama2.py, and so is the text. Each process, a rank, holds a share of every
matrix and of the KV cache; the number of ranks must divide the number of key/value heads. Rank 0 is
llama2.main(): it alone reads, samples and prints. The others follow: they compute each of its passes
with it. Tried with several processes on one CPU, never on GPUs.
"""

import datetime
import os
import re
import signal
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import prelude

with prelude.imports(__name__):
    import torch
    import torch.nn.functional as F
    from torch import Tensor, distributed, nn

    import llama2
    from llama2 import Cache, Checkpoint, Llama, Tokenizer, Weight

# Tensor parallelism as in Megatron-LM (arXiv:1909.08053): each rank has a share of every matrix.
AXES = {  # what a rank has of a matrix (out, in): 0: some of its rows, 1: some of its columns
    "embed_tokens": 1,
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
    "lm_head": 0,
}


def share_of(name: str, weights: dict[str, Weight], kv_heads: int, rank: int, count: int) -> Weight:
    """The share of a weight that one of `count` ranks has. Raises ValueError if there is none."""
    weight = weights[name]
    axis = AXES.get(name.split(".")[-2])
    if axis is None:  # a norm: every rank has all of it
        return weight

    # 1. The smallest run of rows or columns that must stay on one rank: those of a block; in
    #    attention those of a key/value head and its query heads; in gate_proj and up_proj the rows
    #    that feed one block of down_proj.
    stored = llama2.find_type(weight.ggml_type)
    block, nbytes = stored.count, stored.nbytes
    size = weight.shape[axis]
    unit = block if axis == 1 else 1
    if ".self_attn." in name:
        unit = size // kv_heads
    if ".mlp." in name:
        down = weights[re.sub("[a-z]+_proj", "down_proj", name)]
        unit = llama2.find_type(down.ggml_type).count

    # 2. This rank's range of rows or columns.
    units = size // unit
    start = units * rank // count * unit
    stop = units * (rank + 1) // count * unit
    cuts_block = axis == 1 and (start % block or stop % block)
    if start == stop or cuts_block:
        actual = f"{size} cannot be divided by {count} ranks into units of {unit}"
        raise ValueError(f"{name} ({weight.ggml_type}): {actual}")

    # 3. The same in bytes: read() returns uint8 (rows, bytes per row).
    shape = [*weight.shape]
    shape[axis] = stop - start
    share = slice(start, stop), slice(None)
    if axis == 1:
        share = slice(None), slice(start // block * nbytes, stop // block * nbytes)

    def read() -> Tensor:
        return weight.read()[share].contiguous()

    return replace(weight, shape=tuple(shape), read=read)


def rank_share(checkpoint: Checkpoint, rank: int, count: int) -> Checkpoint:
    """The share of a model that one of `count` ranks has (Megatron-LM, section 3).

    Attention is divided by its key/value heads, the MLP by its width: a rank has rows of gate_proj
    and up_proj, and the same columns of down_proj. Raises ValueError unless the heads and the
    blocks can be divided.
    """
    config = checkpoint.config
    kv_heads = config.num_key_value_heads
    if kv_heads % count:
        counts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        raise ValueError(f"{count} ranks for {kv_heads} key/value heads; expected {counts}")
    weights = dict(checkpoint.weights)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    shares = {name: share_of(name, weights, kv_heads, rank, count) for name in weights}
    config = replace(
        config,
        num_attention_heads=config.num_attention_heads // count,
        num_key_value_heads=kv_heads // count,
        tie_word_embeddings=False,
    )
    return replace(checkpoint, config=config, weights=shares)


def connect(model: Llama) -> None:
    """Add hooks to a model of rank_share() by which it computes together with the other ranks.

    All ranks must then run the same passes: rank 0 tells the others, who follow(), of each.
    """

    def announce(tokens: Tensor, cache: Cache | None = None, all_positions: bool = False) -> None:
        stored = (cache.max_seq_len, cache.pos) if cache else None
        broadcast((tokens.cpu(), stored, all_positions))

    def add(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        distributed.all_reduce(y)
        return y

    def concatenate(start: int, size: int, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        zeros = start, size - start - y.shape[-1]  # on both sides; adding zeros changes no bit
        return add(module, args, F.pad(y, zeros))

    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.register_forward_hook(add)
    model.cache_dtype = None  # with hooks, torch computes attention, and it would convert float16
    rank = distributed.get_rank()
    weight = model.norm.weight
    token = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    # Any input tells how wide a rank's share of the embedding and of the logits is.
    for module, x in ((model.embed_tokens, token), (model.lm_head, weight[None])):
        widths = [0] * distributed.get_world_size()
        distributed.all_gather_object(widths, module(x).shape[-1])
        module.register_forward_hook(partial(concatenate, sum(widths[:rank]), sum(widths)))
    if rank == 0:
        model.register_forward_pre_hook(
            lambda module, args, options: announce(*args, **options), with_kwargs=True
        )


def broadcast(value: Any = None) -> Any:
    """What rank 0 passes, on every rank."""
    values = [value]
    distributed.broadcast_object_list(values, 0)
    return values[0]


def load_share(checkpoint: Checkpoint, *args: Any, **options: Any) -> tuple[Llama, Tokenizer]:
    """llama2.load() for this rank's share of a checkpoint."""
    share = rank_share(checkpoint, distributed.get_rank(), distributed.get_world_size())
    model, tokenizer = llama2.load(share, *args, **options)
    connect(model)
    return model, tokenizer


def load(checkpoint: Checkpoint, *args: Any, **options: Any) -> tuple[Llama, Tokenizer]:
    """llama2.load() for rank 0: all ranks load their shares."""
    rank_share(
        checkpoint, 0, distributed.get_world_size()
    )  # raises, if it must, on this rank alone
    broadcast((checkpoint.path, torch.get_num_threads(), args, options))
    return load_share(checkpoint, *args, **options)


@torch.no_grad()
def follow() -> int:
    """Load what rank 0 loads, and run its passes, until it ends; returns the exit status."""
    warnings.simplefilter("ignore")  # rank 0 gives the same ones
    try:
        order = broadcast()
        if order is None:  # as after --info
            return 0
        path, threads, args, options = order
        torch.set_num_threads(threads)
        model, _ = load_share(llama2.open_checkpoint(path), *args, **options | {"progress": False})
        cache = None
        while (order := broadcast()) is not None:
            tokens, stored, all_positions = order
            if stored is not None:
                size, pos = stored
                if cache is None or (cache.max_seq_len, len(cache.tokens)) != (size, len(tokens)):
                    cache = model.new_cache(size, len(tokens))
                cache.truncate(pos)
            model(tokens.to(model.norm.weight.device), cache if stored else None, all_positions)
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        message = " ".join(str(error).split())
        print(f"ranks.py: error: rank {distributed.get_rank()}: {message}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    """Run llama2.main() on rank 0, and follow() on the others; returns the exit status."""
    if "RANK" not in os.environ:  # not by torchrun: one process
        return llama2.main()
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # which "cuda" then means
    # While a process waits for the others, Python's handlers do not run: the default action must
    # end it. torchrun ends all ranks at Ctrl-C, or when one of them has failed.
    numbers = signal.SIGINT, signal.SIGTERM
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    # The timeout is long, because in a chat the others wait for the person who types at rank 0.
    distributed.init_process_group(backend, timeout=datetime.timedelta(days=30))
    if distributed.get_rank():
        status = follow()
    else:
        for number in numbers:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
        try:
            status = llama2.main(load=load)
        except SystemExit as end:  # --help, a wrong option, a signal
            status = end.code
        if status == 0:
            broadcast(None)
    time.sleep(0.1)  # torch 2.6 waits for the group's threads with the GIL, which they may need
    distributed.destroy_process_group()  # its threads could otherwise abort the process at exit
    return status


if __name__ == "__main__":
    sys.exit(main())
