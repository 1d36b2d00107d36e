"""The cache against raw files in the reference's manner, and against stock zarr-python.

    python scripts/bench_cache.py write|read|size|build [--rounds N] [--target FOLDER]

``write`` and ``read`` use states of Qwen3-4B's shape (five taps and a last state of width 2560).
"raw" is what the reference does, written anew: five ``tobytes()`` of a sample appended to files,
and read back as copies out of a memory map. All methods alternate in one process; medians of the
rounds; user and system CPU seconds beside wall seconds. The process's allocator is left as it is:
only the training command changes it, and that would help raw files too (--allocator does it).
"""

import argparse
import mmap
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from data.cache.format import Header
    from data.cache.plan import Plan

LAYERS, WIDTH, VOCABULARY = 5, 2560, 151_936
SAMPLES, LONGEST = 26, 4000
FIELDS = ("input_ids", "loss_mask", "attention_mask", "hidden", "last_hidden")
Row = dict[str, np.ndarray]
Options = argparse.Namespace


def main() -> None:
    """Runs one of the benchmarks and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("write", "read", "size", "build"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=None, help="where to write (default: /dev/shm)")
    parser.add_argument("--shortest", type=int, default=200, help="tokens; for read")
    parser.add_argument("--target", default="outputs/targets/smollm2-135m")
    parser.add_argument("--rows", default="outputs/demo/rows.jsonl")
    parser.add_argument("--allocator", action="store_true", help="as the command sets it")
    options = parser.parse_args()
    if options.allocator or options.what in ("build", "size"):
        from data.machine import configure_process

        configure_process()
    folder = options.folder or ("/dev/shm" if Path("/dev/shm").is_dir() else None)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        run = {"write": bench_write, "read": bench_read, "size": bench_size, "build": bench_build}
        run[options.what](Path(scratch), options)


# ---- what is compared -----------------------------------------------------------------------


def samples(shortest: int = 200) -> list[Row]:
    """Samples of log-uniform length up to `LONGEST`; random bits, since nothing is compressed."""
    generator = np.random.default_rng(0)
    low, high = float(np.log(shortest)), float(np.log(LONGEST))
    lengths = np.exp(generator.uniform(low, high, SAMPLES)).astype(int)
    return [
        {
            "input_ids": generator.integers(0, VOCABULARY, n, dtype=np.int32),
            "loss_mask": np.ones(n, np.uint8),
            "attention_mask": np.ones(n, np.uint8),
            "hidden": generator.integers(0, 1 << 16, (n, LAYERS, WIDTH), dtype=np.uint16),
            "last_hidden": generator.integers(0, 1 << 16, (n, WIDTH), dtype=np.uint16),
        }
        for n in lengths
    ]


def header_of(rows: list[Row], part_bytes: int = 1 << 30) -> "Header":
    """Header of an exact cache of this shape."""
    from data.cache.format import make_header
    from data.config import CacheConfig

    shape = (tuple(range(LAYERS)), WIDTH, VOCABULARY)
    longest = max(len(row["input_ids"]) for row in rows)
    config = CacheConfig(part_bytes=part_bytes)
    return replace(make_header(shape, "bfloat16", longest, config), cache_uuid="bench")


def write_raw(folder: Path, rows: list[Row]) -> None:
    """The reference's manner: bytes of every field of a sample, one after another, one file."""
    with (folder / "raw.bin").open("wb") as file:
        for row in rows:
            for name in FIELDS:
                file.write(row[name].tobytes())
        file.flush()
        os.fsync(file.fileno())


def plan_of(rows: list[Row]) -> "tuple[Header, Plan]":
    """The header of the samples' cache, and where each sample lies in it."""
    from data.cache.plan import plan_rows

    header = header_of(rows)
    ids = np.arange(2 * len(rows), dtype=np.uint64).reshape(-1, 2)
    return header, plan_rows([len(r["input_ids"]) for r in rows], ids, header.part_tokens)


def write_ours(folder: Path, rows: list[Row]) -> None:
    """Parts of Zarr shards with checksums, synced, renamed and committed."""
    from data.cache.format import array_specs
    from data.cache.store import LocalStore
    from data.cache.write import PartWriter

    header, plan = plan_of(rows)
    store, specs = LocalStore(folder), array_specs(header)
    for part in range(plan.end_part):
        writer = PartWriter(store, part, specs, header.layout, "bench")
        for i in plan.entries_of(part):
            writer.append(rows[i])
        writer.commit({"cache_uuid": "bench", "skipped": [], "computed_tokens": 0})


def write_zarr(folder: Path, rows: list[Row]) -> None:
    """Stock zarr-python into the same arrays: whole shards, since less would be read back first."""
    import zarr

    from data.cache.format import array_specs
    from data.cache.metadata import write_documents, zarr_documents
    from data.cache.store import LocalStore

    header, plan = plan_of(rows)
    write_documents(LocalStore(folder), zarr_documents(header, plan.end_part))
    group = zarr.open_group(folder / "data.zarr", mode="r+")
    capacity = header.part_tokens
    with zarr.config.set({"array.write_empty_chunks": True}):
        for part in range(plan.end_part):
            for spec in array_specs(header):
                whole = np.zeros((capacity, *spec.token_shape), spec.dtype)
                for i in plan.entries_of(part):
                    start = int(plan.starts[i])
                    whole[start : start + len(rows[i][spec.name])] = rows[i][spec.name]
                array = group[spec.name]
                array[part * capacity : (part + 1) * capacity] = whole  # type: ignore[index]
    for path in (folder / "data.zarr").rglob("c.*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def finished_cache(folder: Path, rows: list[Row]) -> None:
    """A complete cache of the samples, as a build leaves it."""
    from data.batch import Row as TokenRow
    from data.cache.finish import finalize
    from data.cache.format import HEADER_KEY
    from data.cache.labels import Labels, labels_key
    from data.cache.plan import Plans, save_plan
    from data.cache.records import FINGERPRINT_KEY
    from data.cache.store import LocalStore
    from data.fingerprint import Fingerprint

    header, plan = plan_of(rows)
    store = LocalStore(folder)
    store.write(HEADER_KEY, header.to_bytes())
    store.write(FINGERPRINT_KEY, Fingerprint({}).to_bytes())
    labels = Labels.of([TokenRow.of([1], [1])] * len(rows), [0] * len(rows))
    store.write(labels_key(0), labels.to_bytes())
    save_plan(store, 0, plan)
    write_ours(folder, rows)
    finalize(store, header, Plans((plan,)))


class RawReader:
    """Copies out of a memory map of the raw file."""

    def __init__(self, folder: Path, rows: list[Row]) -> None:
        sizes = [[row[name].nbytes for name in FIELDS] for row in rows]
        ends = np.cumsum([0, *(size for fields in sizes for size in fields)]).tolist()
        self._bounds = list(pairwise(ends))
        self._shapes = [[(row[name].shape, row[name].dtype) for name in FIELDS] for row in rows]
        with (folder / "raw.bin").open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def read(self, index: int) -> list[np.ndarray]:
        """All fields of a sample."""
        found = []
        for field, (shape, dtype) in enumerate(self._shapes[index]):
            low, high = self._bounds[index * len(FIELDS) + field]
            view = np.frombuffer(self._map, np.uint8, high - low, low)
            found.append(view.view(dtype).reshape(shape).copy())
        return found


# ---- the benchmarks ---------------------------------------------------------------------------


def alternate(work: dict[str, Callable[[], None]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds of each, run in turn; one round before is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, run in work.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            if number:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return {
        name: (statistics.median(w for w, _ in found), statistics.median(c for _, c in found))
        for name, found in times.items()
    }


def report(medians: dict[str, tuple[float, float]], base: str, size: int) -> None:
    """Prints ratios of speed to ``base``."""
    wall, cpu = medians[base]
    sys.stdout.write(f"{'':34} {'wall s':>8} {'MB/s':>8} {'ratio':>6} {'cpu ratio':>9}\n")
    for name, (w, c) in medians.items():
        sys.stdout.write(
            f"{name:34} {w:8.3f} {size / w / 1e6:8.0f} {wall / w:6.2f} {cpu / c:9.2f}\n"
        )
    sys.stdout.flush()


def bench_write(scratch: Path, options: Options) -> None:
    """Writes of the same samples, fsync included, and the memory that each takes."""
    rows = samples()
    size = sum(array.nbytes for row in rows for array in row.values())
    writers = {"raw": write_raw, "ours": write_ours, "zarr-python": write_zarr}

    def fresh(name: str) -> Callable[[], None]:
        def run() -> None:
            folder = scratch / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            writers[name](folder, rows)

        return run

    sys.stdout.write(f"write: {len(rows)} samples, {size / 1e9:.2f} GB, in {scratch}\n")
    report(alternate({name: fresh(name) for name in writers}, options.rounds), "raw", size)
    context = multiprocessing.get_context("spawn")
    for name in writers:
        shutil.rmtree(scratch / name, ignore_errors=True)
        with context.Pool(1) as pool:
            extra = pool.apply(memory_of, (name, str(scratch)))
        sys.stdout.write(f"{name}: {extra / 1e6:.0f} MB of memory beyond the samples in hand\n")


def memory_of(name: str, scratch: str) -> int:
    """Bytes by which the peak of a fresh process grows while it writes many samples."""
    rows = samples()
    folder = Path(scratch) / "warm"
    folder.mkdir()
    writer = {"raw": write_raw, "ours": write_ours, "zarr-python": write_zarr}[name]
    writer(folder, [{n: a[:64] for n, a in rows[0].items()}])
    shutil.rmtree(folder)
    # The peak is set back; getrusage's would be that of the process that started this one.
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    folder.mkdir()
    writer(folder, rows)
    shutil.rmtree(folder)
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    """A figure of /proc/self/status."""
    text = Path("/proc/self/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def bench_read(scratch: Path, options: Options) -> None:
    """Random samples from a warm page cache."""
    import zarr

    from data.cache.read import CacheReader
    from data.config import Check
    from data.pool import BufferPool

    rows = samples(options.shortest)
    for name in ("raw", "ours"):
        (scratch / name).mkdir()
    write_raw(scratch / "raw", rows)
    finished_cache(scratch / "ours", rows)
    raw = RawReader(scratch / "raw", rows)
    folder, pool = scratch / "ours", BufferPool(1 << 30)
    readers = {
        "ours, unchecked": CacheReader(folder, Check.never),
        "ours, unchecked, pooled": CacheReader(folder, Check.never, pool),
        "ours, checked at first touch": CacheReader(folder, Check.first),
        "ours, always checked": CacheReader(folder, Check.always),
        "ours, always checked, pooled": CacheReader(folder, Check.always, pool),
    }
    order = np.random.default_rng(1).permutation(len(rows))
    group = zarr.open_group(folder / "data.zarr", mode="r")
    samples_of = readers["ours, unchecked"].samples
    capacity = readers["ours, unchecked"].header.part_tokens

    def stock() -> None:
        for i in order:
            piece = samples_of.pieces(int(i))[0]
            low = piece.part * capacity + piece.start
            for name in ("hidden", "last_hidden", "input_ids", "loss_mask"):
                np.asarray(group[name][low : low + piece.length])  # type: ignore[index]

    def ours(reader: CacheReader) -> Callable[[], None]:
        def run() -> None:
            for i in order:
                reader.read_batch([int(i)], [0])

        return run

    def reference() -> None:
        for i in order:
            raw.read(int(i))

    work = {"raw": reference, **{n: ours(r) for n, r in readers.items()}, "zarr-python": stock}
    size = sum(array.nbytes for row in rows for array in row.values())
    sys.stdout.write(f"read: {len(rows)} samples in random order, {size / 1e9:.2f} GB, warm\n")
    report(alternate(work, options.rounds), "raw", size)


def bench_size(scratch: Path, options: Options) -> None:
    """Bytes of a token under each choice, and what it costs on the target."""
    import torch
    from rich.console import Console

    from data.cache.estimate import estimate_cache, estimate_table
    from data.cache.format import make_header, raw_token_bytes, token_bytes
    from data.cache.store import LocalStore
    from data.config import CacheConfig

    target, rows = target_and_rows(options)
    torch.manual_seed(0)
    found = estimate_cache(target, rows, CacheConfig(), LocalStore(scratch))
    Console(width=150).print(estimate_table(found))
    raw = raw_token_bytes(LAYERS, WIDTH)
    sys.stdout.write(f"the same choices at Qwen3-4B's shape, of {raw} bytes a token:\n")
    for choice in found.choices:
        last = choice.last.value if choice.last else None
        config = CacheConfig(taps=choice.taps.value, last=last, topk=choice.topk)
        header = make_header((tuple(range(LAYERS)), WIDTH, VOCABULARY), "bfloat16", 4096, config)
        size = token_bytes(header)
        law = f"{last or ''} top-{choice.topk}" if choice.topk else last
        sys.stdout.write(f"  {choice.taps.value:16} {law!s:24} {size:6} {size / raw:.3f}\n")


def bench_build(scratch: Path, options: Options) -> None:
    """Whole builds against the bare pass of the target over the same batches."""
    import torch

    from data.cache.build import build_cache
    from data.cache.passes import PartPasses
    from data.cache.start import RowIndex, make_plan, new_header
    from data.config import CacheConfig
    from data.fingerprint import Fingerprint

    target, rows = target_and_rows(options)
    index, config = RowIndex(rows), CacheConfig()
    header = new_header(target, index, config)
    plan = make_plan(header, index, range(len(rows)), config, 0)
    passes = PartPasses(target, plan, lambda sample: rows[sample], config.batch_tokens)
    fingerprint = Fingerprint.of_target(target)
    tokens = int(index.lengths.sum())

    @torch.inference_mode()
    def bare() -> None:
        for part in range(plan.end_part):
            for group in passes.groups(plan.entries_of(part)):
                pieces = [rows[sample].token_ids for sample in group]
                ids = torch.zeros((len(group), max(map(len, pieces))), dtype=torch.long)
                for b, piece in enumerate(pieces):
                    ids[b, : len(piece)] = torch.tensor(piece)
                target.decoder(input_ids=ids, use_cache=False)

    def build(**choice: object) -> Callable[[], None]:
        def run() -> None:
            shutil.rmtree(scratch / "cache", ignore_errors=True)
            chosen = replace(config, **choice)  # type: ignore[arg-type]
            build_cache(target, rows, chosen, scratch / "cache", fingerprint)

        return run

    work = {
        "bare pass": bare,
        "build, exact": build(),
        "build, int8 and int8": build(taps="int8-h64-g64", last="int8-g64-out32"),
        "build, int4 and top-64": build(taps="int4-h64-g64", last=None, topk=64),
    }
    sys.stdout.write(f"build: {len(rows)} rows, {tokens} tokens of {options.target}\n")
    report(alternate(work, options.rounds), "bare pass", tokens * 6912)


def target_and_rows(options: Options) -> tuple:  # type: ignore[type-arg]
    """The real target and rows that it wrote itself."""
    import torch

    from data.config import CorpusConfig, TargetConfig
    from data.rows import Encoder, read_rows
    from data.target import Target

    taps = [1, 8, 15, 22, 27]
    target = Target(TargetConfig(path=options.target, tap_layers=taps), torch.device("cpu"))
    encoder = Encoder(target.tokenizer, target.stop_ids, target.text_config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        corpus = CorpusConfig(rows=options.rows)
        spool = read_rows(corpus, Path(options.rows), encoder, Path(folder) / "quarantine.jsonl")
        return target, list(spool)


if __name__ == "__main__":
    main()
