"""One rank of tests/test_ranks.py: saves what it computes and how many bytes of weights it holds."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import llama2


def main(root: Path, out: Path, forms: list[str]) -> None:
    torch.set_num_threads(1)
    group, found = llama2.Ranks(), {}
    rank, ranks, tokens = group.rank, group.count, torch.load(root / "tokens")
    assert [rank, ranks] == [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE")]
    assert group.gather(rank) == list(range(ranks)) and llama2.shared(lambda: rank, group) == 0
    for form in forms:
        part = llama2.rank_part(llama2.open_checkpoint(root / form), rank, ranks)
        model = llama2.build_model(part)
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        llama2.connect_ranks(model, group)
        prompt, draws = tokens[0].tolist(), [llama2.Sampling(t, top_p=1, seed=3) for t in (0, 1)]
        texts = [list(llama2.generate(model, prompt, draw, 6)) for draw in draws]
        found[form] = (model(tokens), *texts, held)
        # Where rounding differs between ranks, rank 0's logits are everyone's; hooks are called.
        model.register_forward_hook(lambda module, args, y: y * (1 - rank), prepend=True)
        called, part = [], model.layers[0].mlp.down_proj
        part.register_forward_hook(lambda *args, heard=called: heard.append(1))
        drawn = list(llama2.generate(model, prompt, draws[1], 6))
        assert group.gather(drawn) == [drawn] * ranks and drawn == texts[1] and len(called) == 6
    group.close()
    torch.save(found, out / str(rank))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
