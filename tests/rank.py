"""One rank of tests/test_ranks.py: saves what it computes and how many bytes of weights it holds."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import llama2


def main(root: Path, out: Path, forms: list[str]) -> None:
    torch.set_num_threads(1)
    group = llama2.Ranks()
    rank = group.rank
    assert [rank, group.count] == [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")]
    assert group.gather(rank) == list(range(group.count))
    tokens = torch.load(root / "tokens")
    prompt = tokens[0].tolist()
    greedy, free = (llama2.Sampling(t, top_p=1, seed=3) for t in (0, 1))
    found = {}
    for form in forms:
        part = llama2.rank_part(llama2.open_checkpoint(root / form), rank, group.count)
        model = llama2.build_model(part)
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        llama2.connect_ranks(model, group)
        ids = list(llama2.generate(model, prompt, greedy, 6))
        drawn = list(llama2.generate(model, prompt, free, 6))
        found[form] = (model(tokens), ids, drawn, held)
        # Where rounding differs between ranks, rank 0's logits are everyone's; hooks are called.
        model.register_forward_hook(lambda module, args, y: y * (1 - rank), prepend=True)
        heard = []
        layer = model.layers[0].mlp.down_proj
        layer.register_forward_hook(lambda *args, heard=heard: heard.append(1))
        again = list(llama2.generate(model, prompt, free, 6))
        assert group.gather(again) == [drawn] * group.count
        assert len(heard) == 6
    group.close()
    torch.save(found, out / str(rank))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
