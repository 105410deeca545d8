"""One answer to a prompt, as the model's thread writes it, with the scores of its tokens."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from batch import Row

import llama2
from server.guard import Refusal
from server.tools import Reader, name_tokens


@dataclass
class Score:
    """A token, its log-probability, and the text that it completes."""

    top: dict[int, float]  # log-probabilities of its id and the likeliest; {} for the first id
    text: str
    start: int  # of the text, in the whole


class Choice(Row):
    """An answer of a Job, which it tells what is new.

    Scores are of the model's own logits, before penalties, biases and grammars.
    """

    def __init__(self, job: Any, index: int, ids: list[int]) -> None:
        self.job, self.ids = job, ids
        self.owner = job.owner
        if job.score_prompt:  # it is read for its scores, and equals no other
            self.owner, self.chunk = self, llama2.SCORE_CHUNK
        self.about = {"index": index, "logprobs": None, "finish_reason": None}
        self.reader = Reader(job.answer)
        self.unscored: list[torch.Tensor] = []  # logits (1, V) of ids that have no score yet
        self.scores: list[Score] = []
        self.told = 0  # how many of them the client has
        self.length = 0  # of the text of all tokens, in characters
        self.thoughts = 0  # tokens of reasoning

    def begin(self, step: Row) -> Iterator[str]:
        """The texts of the answer."""
        self.start = time.perf_counter()
        job, session = self.job, self.job.session
        if job.chat:
            job.tell(self, self.reader.message, [])  # its role
        seed = job.seed
        if seed is not None:  # several answers to one prompt differ
            seed = (seed + self.about["index"] % job.n) % 2**63
        processor = job.sampling.logits_processor
        if job.grammar:
            processor = replace(processor, grammar=job.grammar.copy())
        self.cache = session.take_cache(self.ids, job.reuse)
        self.stream = llama2.stream_text(
            session.model,
            job.tokenizer,
            self.ids,
            sampling=replace(job.sampling, seed=seed, logits_processor=processor),
            cache=self.cache,
            step=step,
            **job.options,
        )
        first = job.score_prompt or self.stream.decoder.strip
        self.decoder = llama2.StreamDecoder(job.tokenizer, first)
        if job.score_prompt:
            self.append(self.ids[0], {})
        if job.echo:
            self.take(session.tokenizer.decode(self.ids))
        return self.stream

    def __call__(self, tokens: torch.Tensor, cache: llama2.Cache) -> torch.Tensor:
        """tokens (1, n) -> logits (1, V), once a pass has made them, if anybody waits for them."""
        if self.job.is_over:
            raise Refusal(499, "the client hung up")
        logits = super().__call__(tokens, cache)
        if self.job.top is not None:
            self.unscored.append(logits)
        return logits

    def read(self, model: llama2.Llama, tokens: torch.Tensor) -> torch.Tensor:
        """A pass for the next tokens (1, T): logits (1, V). In a prompt it may score those after them."""
        if not self.job.score_prompt:
            return super().read(model, tokens)
        end = self.cache.pos + 1
        logits = model(tokens, self.cache, all_positions=True)[0]  # (T, V)
        self.add(logits, self.tokens[0, end : end + len(logits)].tolist())
        return logits[-1:]

    def add(self, logits: torch.Tensor, ids: Sequence[int]) -> None:
        """Keep the scores of ids, given the logits (T, V) by which each was predicted, and maybe the
        next.
        """
        logprobs = logits.log_softmax(-1)[:, : self.job.session.model.vocab_size]
        values, indices = logprobs.topk(self.job.top)
        for token_id, own, *best in zip(ids, logprobs, indices.tolist(), values.tolist()):
            self.append(token_id, {token_id: own[token_id].item()} | dict(zip(*best)))

    def append(self, token_id: int, top: dict[int, float]) -> None:
        """Keep the score of an id."""
        text = self.decoder.decode(token_id)
        self.scores.append(Score(top, text, self.length))
        self.length += len(text)

    def take_scores(self) -> list[Score]:
        """The scores of what is shown now.

        At the end all remaining scores come, except those of text that a stop text hides.
        """
        reason = self.stream.stop_reason
        if self.unscored:
            ids = self.stream.generation.ids[-len(self.unscored) :]
            if reason.startswith("stop token") and not self.job.score_end:
                ids.pop()
            self.add(torch.cat(self.unscored), ids)
            self.unscored = []
        shown = self.length - len(self.stream.waiting)
        whole = reason and not reason.startswith("stop text")
        waiting = self.scores[self.told :]
        new = waiting[: sum(whole or score.start < shown for score in waiting)]
        self.told += len(new)
        if whole and new:  # incomplete characters
            new[-1].text += self.decoder.flush()
        return new

    def take(self, text: str, ended: bool = False) -> None:
        """Tell what a text adds to the answer."""
        new = self.take_scores()
        delta = self.reader.feed(text, ended)
        if delta or new:
            self.job.tell(self, delta, new)
        if self.reader.is_reasoning:
            self.thoughts = len(self.stream.generation.new_ids)

    def end(self, ended: Any) -> None:
        """Tell the rest, and why the answer ended; an error ends all answers of the Job. The row
        remembers the conversation.
        """
        if isinstance(ended, Exception):
            self.job.fail(ended)
        else:
            self.take("", ended=True)
            stopped = "tool_calls" if "tool_calls" in self.reader.message else "stop"
            is_cut = not self.stream.stop_reason.startswith("stop")
            self.about["finish_reason"] = "length" if is_cut else stopped
            self.job.tell(self, {}, [])
            self.job.finish()
        super().end(ended)
        rows = self.job.session.rows
        rows.remove(self)
        if self.cache:
            rows.append(self)  # which was used last

    def entries(self, score: Score) -> list[dict]:
        """A token, and then the likeliest ones in its place. No two have the same name."""
        tokenizer = self.job.session.tokenizer
        entries = {}
        for token_id, logprob in score.top.items():
            data = tokenizer.token_bytes(token_id)  # maybe only some bytes of a character
            name = data.decode(errors="backslashreplace")
            if not entries:
                name = name_tokens(tokenizer, score.text)
            elif name in ("", *entries):
                name = tokenizer.vocabulary.pieces[token_id]
            entries[name] = {"token": name, "logprob": logprob, "bytes": [*data]}
        return [*entries.values()]

    def said(self, key: str, message: dict, scores: list[Score]) -> dict:
        """The choice in OpenAI's form, with a message or a delta, and with scores if they were asked
        for.
        """
        said = {key: message} if self.job.chat else {"text": message.get("content", "")}
        if self.job.top is None:
            return self.about | said
        tokens = [self.entries(score) for score in scores]
        content = [{**token[0], "top_logprobs": token} for token in tokens if token]
        # It has bytes: the names of other lists do not tell </s> from text.
        table = {"content": content, "refusal": None}
        if not self.job.chat:
            table |= {
                "tokens": [score.text for score in scores],
                # Nothing comes before a first token.
                "token_logprobs": [token[0]["logprob"] if token else None for token in tokens],
                "top_logprobs": [
                    {e["token"]: e["logprob"] for e in token} or None for token in tokens
                ],
                "text_offset": [score.start for score in scores],
            }
        return self.about | said | {"logprobs": table}
