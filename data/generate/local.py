"""Answers in process, batched: what `transformers` generates."""

from collections.abc import Container, Generator, Iterator, Sequence

import torch

from data.batch import content_hash
from data.config import RegenerateConfig
from data.generate.base import Answer, Job
from data.target import Target


class LocalBackend:
    """The target in this process. Batches are planned over all jobs and seeded one by one, so that
    a run that is killed and started again draws exactly what an unbroken one would have drawn.
    """

    def __init__(self, target: Target, config: RegenerateConfig) -> None:
        self._target, self._config = target, config

    def answer(
        self, jobs: Sequence[Job], done: Container[str]
    ) -> Generator[Sequence[Answer], None, None]:
        """One group a batch, longest context first: the first batch is the largest, so that one
        that does not fit fails at once, and little is padded.

        A batch of which any answer is missing is drawn whole: its answers depend on its seed.
        """
        drawn: set[str] = set()
        ordered = sorted(jobs, key=lambda job: -len(job.context))
        for start in range(0, len(ordered), self._config.batch_size):
            batch = ordered[start : start + self._config.batch_size]
            if any(job.key not in done and job.key not in drawn for job in batch):
                drawn.update(job.key for job in batch)
                yield list(self._draw(batch))

    def _draw(self, batch: Sequence[Job]) -> Iterator[Answer]:
        target = self._target
        contexts = [list(job.context) for job in batch]
        longest = max(len(c) for c in contexts)
        pad = target.stop_ids[0]
        ids = torch.tensor([[pad] * (longest - len(c)) + c for c in contexts], device=target.device)
        mask = torch.tensor(
            [[0] * (longest - len(c)) + [1] * len(c) for c in contexts], device=target.device
        )
        batch_key = content_hash([self._config.seed, [job.key for job in batch]])
        torch.manual_seed(int(batch_key[:15], 16))
        with torch.inference_mode():
            output = target.model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=self._config.max_new_tokens,
                eos_token_id=list(target.stop_ids),
                pad_token_id=pad,
                **self._sampling(),
            )
        for job, answer in zip(batch, output[:, longest:].tolist(), strict=True):
            stop = next((i for i, t in enumerate(answer) if t in target.stop_ids), None)
            completion = answer if stop is None else answer[: stop + 1]
            text = target.tokenizer.decode(completion if stop is None else completion[:-1])
            yield Answer(job, completion, text, "length" if stop is None else "stop")

    def _sampling(self) -> dict[str, object]:
        config = self._config
        if config.temperature == 0:
            return {"do_sample": False, "temperature": None, "top_p": None}
        return {
            "do_sample": True,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": config.top_k,
        }
