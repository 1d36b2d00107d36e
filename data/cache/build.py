"""Builds a cache: plan, self-check, one pass of the target over the rows, part by part.

Any number of processes build one cache, and come and go. A process that is killed loses at most
the parts in hand; started again, or by another one, they are redone, and the plan makes the
result the same bit for bit.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from data.batch import Row
from data.cache.claims import Claims, part_work
from data.cache.encode import StateEncoder
from data.cache.finish import finalize
from data.cache.format import Header, array_specs
from data.cache.job import PartJob, Task, call
from data.cache.passes import PartPasses
from data.cache.plan import Plan, Plans
from data.cache.records import MANIFEST_KEY, Manifest, commit_key, committed_parts
from data.cache.selfcheck import SelfCheck, self_check
from data.cache.start import RowIndex, open_header, open_plans, require_space
from data.cache.store import LocalStore, Store
from data.config import CacheConfig
from data.errors import CacheError
from data.fingerprint import Fingerprint
from data.pipeline import Stage
from data.progress import Meter
from data.target import Target

log = logging.getLogger(__name__)
_START, _FINISH = "start", "finish"
_POLL_S = 0.5


@dataclass(frozen=True)
class BuildSummary:
    """What is in the finished cache, how many parts this process added, and the self-check
    (None when nothing was left to build).
    """

    manifest: Manifest
    parts_built: int
    check: SelfCheck | None


def build_cache(
    target: Target,
    rows: Sequence[Row],
    config: CacheConfig,
    store: Store | Path,
    fingerprint: Fingerprint,
    allow_mismatch: Sequence[str] = (),
    accepted: Callable[[], None] = lambda: None,
) -> BuildSummary:
    """Builds, resumes or joins the build of the cache of ``rows``.

    ``accepted`` is called once the store and the inputs are found to fit. Returns when the cache
    is complete, also when other processes build the last parts.

    Raises:
        CacheError: the store holds another cache, is too small or full, a codec costs too much on
            this target, or the target's own logits cannot be recomputed from what would be stored.
        FingerprintMismatchError: the parts were built from another target or template.
    """
    if isinstance(store, Path):
        store.mkdir(parents=True, exist_ok=True)
        store = LocalStore(store)
    index = RowIndex(rows)
    with storage_errors(store), Claims(store, config.claim_timeout_s) as claims:
        with _alone(claims, _START):
            header = open_header(store, target, index, config, fingerprint, allow_mismatch)
            plans = open_plans(store, header, index, config)
        accepted()
        build = _Build(target, index, config, store, claims, header, plans)
        todo = build.missing()
        check = None
        if todo:
            _reopen(store, plans, todo)
            require_space(store, header, build.tokens(todo))
            check = self_check(target, rows, config)
            build.run()
        with _alone(claims, _FINISH):
            manifest = finalize(store, header, plans)
    return BuildSummary(manifest, build.parts_built, check)


@contextlib.contextmanager
def storage_errors(store: Store) -> Iterator[None]:
    """Says what to do when the storage refuses a read or a write."""
    try:
        yield
    except OSError as error:
        free = store.free_bytes()
        room = "" if free is None else f"; {free / 1e9:.2f} GB free"
        raise CacheError(
            f"{store.url}: could not be written ({error}){room}\n"
            "  fix: make room and run the same command again; finished parts stay"
        ) from error


@contextlib.contextmanager
def _alone(claims: Claims, work: str) -> Iterator[None]:
    """Waits until no other builder does this work, and keeps others from it."""
    told = False
    while not claims.take(work):
        if not told:
            log.info("cache: waiting for %s", claims.holder(work))
            told = True
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        claims.release(work)


def _reopen(store: Store, plans: Plans, todo: Sequence[int]) -> None:
    """A cache that lost parts is unfinished; one that only grows stays readable meanwhile."""
    if not store.exists(MANIFEST_KEY):
        return
    try:
        finished = Manifest.load(store).num_parts
    except CacheError:
        finished = plans.num_parts
    if min(todo) < finished:
        store.delete(MANIFEST_KEY)


class _Build:
    """The work of one process."""

    def __init__(
        self,
        target: Target,
        index: RowIndex,
        config: CacheConfig,
        store: Store,
        claims: Claims,
        header: Header,
        plans: Plans,
    ) -> None:
        self._target, self._index, self._config = target, index, config
        self._store, self._claims, self._plans = store, claims, plans
        self._header = header
        self._encoder = StateEncoder(target, header)
        self._passes = {
            plan.first_part: PartPasses(target, plan, self._row_of(plan), config.batch_tokens)
            for plan in plans
        }
        self._jobs: dict[int, PartJob] = {}
        self._started = time.monotonic()
        self._written = self._rows = 0
        self.parts_built = 0

    def missing(self) -> list[int]:
        """Parts that are not committed."""
        done = committed_parts(self._store)
        return [p for p in range(self._plans.num_parts) if p not in done]

    def tokens(self, parts: Sequence[int]) -> int:
        """Tokens of some parts."""
        return sum(self._part_tokens(p) for p in parts)

    def run(self) -> None:
        """Builds parts until every one is committed, by whomever."""
        try:
            self._run()
        except BaseException:  # also Ctrl-C: nothing half written stays
            for job in self._jobs.values():
                job.discard()
            raise

    def _run(self) -> None:
        todo = self.missing()
        total, left = self._plans.stored_tokens, self.tokens(todo)
        bound = self._config.queue_bytes
        told, wait = False, _POLL_S
        with (
            Meter("cache", total, "tokens", done=total - left) as meter,
            Stage("write", call, bound) as write,
            Stage("encode", call, bound) as encode,
        ):
            while todo:
                for part in todo:
                    if self._take(part):
                        self._compute(part, encode, write, meter)
                encode.drain()
                write.drain()
                before, todo = todo, self.missing()
                if todo != before:
                    wait = _POLL_S
                    continue
                if not told:
                    names = {self._claims.holder(part_work(p)) for p in todo}
                    log.info("cache: %d parts are being built by %s", len(todo), sorted(names))
                    told = True
                time.sleep(wait)
                wait = min(1.5 * wait, max(self._config.claim_timeout_s / 10, _POLL_S))

    def _take(self, part: int) -> bool:
        if not self._claims.take(part_work(part)):
            return False
        if self._store.exists(commit_key(part)):  # committed since the listing
            self._claims.release(part_work(part))
            return False
        keys = [spec.object_key(part) for spec in array_specs(self._header)]
        self._store.remove_partials(keys)  # of a builder that was killed
        return True

    def _compute(
        self, part: int, encode: "Stage[Task]", write: "Stage[Task]", meter: Meter
    ) -> None:
        """Runs the target over a part; encoding and writing follow in their own threads."""
        plan = self._plans.plan_of_part(part)
        job = PartJob(self._store, self._encoder, part, self._claims, self._committed)
        self._jobs[part] = job
        for found in self._passes[plan.first_part].run(part):
            job.put(found, encode, write)
            self._rows += sum(piece.entry < plan.num_samples for piece in found.pieces)
            meter.add(sum(map(len, found.pieces)), self._note(encode, write))
        job.end(encode, write)

    def _committed(self, part: int, written: int) -> None:
        """Runs in the writing thread."""
        self._claims.release(part_work(part))
        self._jobs.pop(part)
        self._written += written
        self.parts_built += 1

    def _note(self, encode: "Stage[Task]", write: "Stage[Task]") -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        text = f"{self._rows / seconds:.1f} rows/s, {self._written / seconds / 1e9:.3f} GB/s"
        waits = {"encoding": encode.blocked_s, "disk": write.blocked_s}
        slow = [f"{n} holds it up {s / seconds:.0%}" for n, s in waits.items() if s > seconds / 20]
        return ", ".join([text, *slow])

    def _part_tokens(self, part: int) -> int:
        plan = self._plans.plan_of_part(part)
        return int(plan.lengths[plan.entries_of(part)].sum())

    def _row_of(self, plan: Plan) -> Callable[[int], Row]:
        def row_of(sample: int) -> Row:
            place = self._index.place(plan.row_ids[sample])
            if place is None:
                raise CacheError(
                    f"{self._store.url}: an unfinished part needs a row that is not among those "
                    "given\n  fix: give all rows of the cache (corpus.rows, corpus.sources)"
                )
            return self._index.rows[place]

        return row_of
