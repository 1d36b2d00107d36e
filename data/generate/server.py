"""Answers from OpenAI-compatible servers, many at a time. The only module that knows ``openai``.

A server gets the prompt as token ids, so that it sees exactly the context that a row records.
"""

import asyncio
import logging
import os
from collections.abc import Container, Generator, Sequence
from typing import Any

import openai
from openai.types import Completion

from data.batch import content_hash
from data.config import RegenerateConfig
from data.errors import ServerError
from data.generate.base import Failure, FailureClass, Job, Outcome
from data.generate.pool import Pool
from data.generate.reply import ReplyReader

KEY_VARIABLE = "OPENAI_API_KEY"
_MESSAGE_LENGTH = 500
_TOO_MANY_REQUESTS, _SERVER_SIDE = 429, 500
# Nothing that another row could do better: no permission, or no such model or path.
_HOPELESS = (openai.AuthenticationError, openai.PermissionDeniedError, openai.NotFoundError)


class ServerBackend:
    """Servers that run the target and share the load; each request goes to the least busy one."""

    def __init__(
        self,
        tokenizer: Any,  # noqa: ANN401 - any transformers tokenizer
        stop_ids: Sequence[int],
        config: RegenerateConfig,
    ) -> None:
        self._config, self._stop_ids = config, list(stop_ids)
        self._reader = ReplyReader(tokenizer, stop_ids)
        self._models: dict[str, str] = {}
        self._secret = os.environ.get(KEY_VARIABLE, "")
        for name in ("httpx2", "httpx", "openai"):  # they log a line for every request
            logging.getLogger(name).setLevel(logging.WARNING)

    def answer(
        self, jobs: Sequence[Job], done: Container[str]
    ) -> Generator[Sequence[Outcome], None, None]:
        """Asks for what is not done, each key once; a group is what arrived since the last one.

        Raises:
            ServerError: the servers refuse every request, or do not see the context as sent.
        """
        missing: dict[str, Job] = {}
        for job in jobs:
            if job.key not in done:
                missing.setdefault(job.key, job)
        if not missing:
            return
        with asyncio.Runner() as runner:
            crew = runner.run(self._start(list(missing.values())))
            try:
                left = len(missing)
                while left:
                    group = runner.run(crew.arrived())
                    left -= len(group)
                    yield group
            finally:
                runner.run(crew.stop())

    async def _start(self, jobs: Sequence[Job]) -> "Crew":
        clients = [
            openai.AsyncOpenAI(
                base_url=url,
                api_key=self._secret or "none",
                timeout=self._config.timeout_s,
                max_retries=self._config.max_retries,
            )
            for url in self._config.servers
        ]
        return Crew(self, Pool(clients, self._config.concurrency), jobs)

    async def ask(self, pool: Pool[openai.AsyncOpenAI], job: Job) -> Outcome:
        """One answer. A server that fails it hands it on to the next one.

        Raises:
            ServerError: no server would ever answer.
        """
        tried: list[openai.AsyncOpenAI] = []
        while True:
            client = await pool.take(tried)
            failure: Failure | None = None
            try:
                reply = await self._complete(client, job)
            except _HOPELESS as error:
                raise self._refusal(client, error) from error
            except (openai.APIError, ValueError) as error:  # ValueError: a body that is no JSON
                failure = Failure(job, classify(error), self._words(error))
            else:
                return self._reader.read(job, reply)
            finally:
                transient = failure is not None and failure.error is not FailureClass.bad_request
                await pool.give_back(client, failed=transient)
            tried.append(client)
            if not transient or len(tried) == len(self._config.servers):
                return failure

    async def _complete(self, client: openai.AsyncOpenAI, job: Job) -> dict[str, Any]:
        url = str(client.base_url)
        if url not in self._models:
            self._models[url] = self._config.server_model or await only_model(client)
        completion = await client.completions.create(
            model=self._models[url],
            prompt=list(job.context),
            max_tokens=self._config.max_new_tokens,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            seed=seed_of(job),
            extra_body=self._extra(),
        )
        if not isinstance(completion, Completion):  # the client hands on text that is no JSON
            raise ValueError("the reply is no completion")
        return completion.to_dict()

    def _extra(self) -> dict[str, object]:
        """What engines know beyond OpenAI's own fields. All of the sampling is said: an engine
        takes what is left open from the generation config that ships with the target.
        """
        return {
            "return_token_ids": True,
            "stop_token_ids": self._stop_ids,
            "top_k": self._config.top_k or -1,  # -1 is "all" for vLLM, SGLang and llama.cpp
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }

    def _refusal(self, client: openai.AsyncOpenAI, error: openai.APIStatusError) -> ServerError:
        return ServerError(
            f"{client.base_url} refuses every request ({error.status_code}: {self._words(error)})",
            f"{KEY_VARIABLE} in the environment for 401 and 403; for 404 the address, which ends "
            "in /v1, and regenerate.server_model",
        )

    def _words(self, error: Exception) -> str:
        """The server's words, short, and without the key if it repeats it."""
        words = str(error)
        if self._secret:
            words = words.replace(self._secret, "***")
        return words[:_MESSAGE_LENGTH]


class Crew:
    """The workers of one wave, and the queue into which they put outcomes."""

    def __init__(
        self, backend: ServerBackend, pool: Pool[openai.AsyncOpenAI], jobs: Sequence[Job]
    ) -> None:
        self._backend, self._pool, self._jobs = backend, pool, iter(jobs)
        self.outcomes: asyncio.Queue[Outcome | BaseException] = asyncio.Queue()
        count = min(pool.room, len(jobs))
        self._workers = [asyncio.create_task(self._work()) for _ in range(count)]
        for worker in self._workers:
            worker.add_done_callback(self._report)

    async def _work(self) -> None:
        for job in self._jobs:  # shared: each worker takes the next one
            self.outcomes.put_nowait(await self._backend.ask(self._pool, job))

    def _report(self, worker: "asyncio.Task[None]") -> None:
        """A worker that ends in an error must not leave the others waiting for its outcome."""
        if not worker.cancelled() and (error := worker.exception()) is not None:
            self.outcomes.put_nowait(error)

    async def arrived(self) -> list[Outcome]:
        """Waits for an outcome; returns all that are there."""
        found = [await self.outcomes.get()]
        while not self.outcomes.empty():
            found.append(self.outcomes.get_nowait())
        outcomes = [o for o in found if not isinstance(o, BaseException)]
        errors = [o for o in found if isinstance(o, BaseException)]
        if not errors:
            return outcomes
        if outcomes:  # answers first: they are kept
            for error in errors:
                self.outcomes.put_nowait(error)
            return outcomes
        raise errors[0]

    async def stop(self) -> None:
        """Cancels what is in flight and closes the connections."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        for client in self._pool.members:
            await client.close()


async def only_model(client: openai.AsyncOpenAI) -> str:
    """The one model that a server lists.

    Raises:
        ServerError: it lists none or several.
    """
    names = [model.id for model in (await client.models.list()).data]
    if len(names) != 1:
        raise ServerError(
            f"{client.base_url} lists {len(names)} models ({', '.join(names)})",
            "say which one is the target: regenerate.server_model=NAME",
        )
    return names[0]


def classify(error: Exception) -> FailureClass:
    """The class of what the client raised after its repetitions."""
    if isinstance(error, openai.APITimeoutError):
        return FailureClass.timeout
    if isinstance(error, openai.APIConnectionError):
        return FailureClass.connection
    status = error.status_code if isinstance(error, openai.APIStatusError) else _SERVER_SIDE
    if status == _TOO_MANY_REQUESTS:
        return FailureClass.rate_limit
    return FailureClass.server_error if status >= _SERVER_SIDE else FailureClass.bad_request


def seed_of(job: Job) -> int:
    """31 bits that depend on the answer's key alone (which holds ``regenerate.seed``)."""
    return int(content_hash(job.key)[:8], 16) >> 1
