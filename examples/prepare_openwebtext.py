#!/usr/bin/env python3
"""Makes of OpenWebText, or of text of your own, what the recipes train on: tokens in Megatron's indexed format.

    pip install datasets transformers tqdm
    python prepare_openwebtext.py --output /data/openwebtext

Documents keep their order, and each ends with the tokenizer's end-of-text token. The script works in shards: restarted
with the same command, it makes only those that are missing, and the result is the same to the byte.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

# Without a GPU's libraries Megatron warns of each, in every process.
warnings.filterwarnings("ignore", module=r"megatron\.")
from megatron.core.datasets.indexed_dataset import (  # noqa: E402
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

if TYPE_CHECKING:
    import datasets
    import tokenizers
    import transformers

_SHARD = 10_000
"""Documents of a shard, which is what an interruption loses at most of each process's work."""

_BATCH = 256
"""Documents that a process holds in memory at a time."""

_ENOUGH = 1000
"""Fewest documents: one in a thousand is held out for the test."""

_LOADERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


class PreparationError(ValueError):
    """Something that the user can put right."""


def main() -> None:
    """Parses the command line and prepares the data."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for tokens and tokenizer; DATA of train.sh")
    parser.add_argument(
        "--dataset", default="Skylion007/openwebtext", help="name on the Hugging Face hub (default: %(default)s)"
    )
    parser.add_argument("--revision", help="of the dataset: a branch, commit or pull request such as refs/pr/22")
    parser.add_argument(
        "--files",
        type=Path,
        nargs="+",
        help=f"your own text instead, files or folders of one kind: {', '.join(_LOADERS)}; a .txt file is one document",
    )
    parser.add_argument("--text-column", default="text", help="where records hold their text (default: %(default)s)")
    parser.add_argument("--tokenizer", default="gpt2", help="name on the hub, or a folder (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: all cores, %(default)s)")
    options = parser.parse_args()
    try:
        prepare(options)
    except PreparationError as error:
        parser.error(str(error))


def prepare(options: argparse.Namespace) -> None:
    """Writes ``text.bin``, ``text.idx`` and ``tokenizer/`` into the output folder, and says how to train on them.

    Raises:
        PreparationError: If the input cannot be used, or the output folder holds data from other input.
    """
    if options.workers < 1:
        raise PreparationError(f"--workers {options.workers}: give 1 or more.")
    tokenizer = _load_tokenizer(options.tokenizer)
    texts, source = _load_texts(options)
    _check_settings(
        options.output,
        {
            **source,
            "--text-column": options.text_column,
            "--tokenizer": f"{len(tokenizer)} tokens, sha256 {_digest(tokenizer.backend_tokenizer.to_str())}",
            "documents": len(texts),
            "documents in a shard": _SHARD,
        },
    )
    # With the data, so that training needs neither the hub nor a network.
    tokenizer.save_pretrained(options.output / "tokenizer")
    result = options.output / "text"
    if _tokens(result) is None:
        shards = [options.output / "shards" / f"{index:06d}" for index in range(math.ceil(len(texts) / _SHARD))]
        _write_shards(shards, texts, tokenizer, options.workers)
        with _writing(result, len(tokenizer)) as builder:
            for shard in tqdm(shards, unit="shard", desc="merging"):
                builder.add_index(str(shard))
    shutil.rmtree(options.output / "shards", ignore_errors=True)
    if len(texts) < _ENOUGH:
        print(
            f"WARNING: {len(texts):,} documents. With fewer than {_ENOUGH:,} the recipes' --split 949,50,1 leaves none for the "
            "test, and Megatron waits for ever on an empty split. Train with another --split."
        )
    size = Path(get_bin_path(str(result))).stat().st_size
    print(
        f"{len(texts):,} documents, {_tokens(result):,} tokens, {size / 1e9:,.2f} GB. For train.sh and train.slurm:\n\n"
        f"export DATA={options.output.resolve()}\n\nFor a command of your own:\n\n"
        f"--data-path {result.resolve()} --tokenizer-type HuggingFaceTokenizer "
        f"--tokenizer-model {options.output.resolve() / 'tokenizer'} --vocab-size {len(tokenizer)}"
    )


def _load_tokenizer(name: str) -> "transformers.PreTrainedTokenizerFast":
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise PreparationError(
            f"--tokenizer {name} cannot be loaded: {_first_line(error)} Give a folder with tokenizer.json, or a name on the "
            "hub, which this machine must reach once."
        ) from error
    if not tokenizer.is_fast:
        raise PreparationError(f"--tokenizer {name} has no tokenizer.json, hence no fast implementation. Give one that has.")
    if tokenizer.eos_token_id is None:
        raise PreparationError(f"--tokenizer {name} has no end-of-text token to put between documents. Set its eos_token.")
    # A document is tokenized whole, however long the texts are that the tokenizer's own model can read.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def _load_texts(options: argparse.Namespace) -> tuple["datasets.Dataset", dict[str, Any]]:
    """The documents, mapped from disk, and what identifies them."""
    import datasets

    if options.files:
        files = _files(options.files)
        arguments: dict[str, Any] = {"path": _LOADERS[files[0].suffix], "data_files": [str(file) for file in files]}
        if files[0].suffix == ".txt":
            arguments["sample_by"] = "document"
        states = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        source = {"--files": f"{len(files)} files, sha256 of names, sizes and times {_digest(json.dumps(states))}"}
    else:
        arguments = {"path": options.dataset, "revision": options.revision}
        source = {"--dataset": options.dataset, "--revision": options.revision}
    try:
        texts = datasets.load_dataset(split="train", **arguments)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise PreparationError(
            f"{', '.join(f'{name} {value}' for name, value in source.items())} cannot be read: {_first_line(error)} A dataset "
            "whose main branch holds a loading script needs the --revision of one that does not, or its files and --files."
        ) from error
    if options.text_column not in texts.column_names:
        raise PreparationError(
            f"--text-column {options.text_column}: the records have {', '.join(texts.column_names)}. Give the one with text."
        )
    if not len(texts):
        raise PreparationError(f"{', '.join(source)}: no documents.")
    return texts.select_columns([options.text_column]), source


def _first_line(error: BaseException) -> str:
    return str(error.__cause__ or error).partition("\n")[0]


def _files(paths: list[Path]) -> list[Path]:
    """All files of the kinds that can be read, in an order that is the same on every machine."""
    found = []
    for path in paths:
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = [file for file in inside if file.suffix in _LOADERS and file.is_file()]
        if not files:
            raise PreparationError(f"--files {path}: no {', '.join(_LOADERS)} file there.")
        found += files
    loaders = {_LOADERS[file.suffix] for file in found}
    if len(loaders) > 1:
        raise PreparationError(f"--files: {', '.join(sorted(loaders))} files together. Give files of one kind.")
    return found


def _check_settings(output: Path, settings: dict[str, Any]) -> None:
    """Records what the output is made from, or compares it with what is recorded there."""
    record = output / "settings.json"
    if not record.exists():
        output.mkdir(parents=True, exist_ok=True)
        partial = record.with_suffix(".partial")
        partial.write_text(json.dumps(settings, indent=2))
        partial.replace(record)
        return
    recorded = json.loads(record.read_text())
    changed = [name for name in {**recorded, **settings} if recorded.get(name) != settings.get(name)]
    if changed:
        differences = "; ".join(f"{name}: {recorded.get(name)} there, {settings.get(name)} now" for name in changed)
        raise PreparationError(
            f"--output {output} holds data of other settings ({differences}). Give another --output, or delete that folder."
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _write_shards(
    shards: list[Path], texts: "datasets.Dataset", tokenizer: "transformers.PreTrainedTokenizerFast", workers: int
) -> None:
    """Writes those shards that are not there yet."""
    shards[0].parent.mkdir(exist_ok=True)
    missing = [index for index, shard in enumerate(shards) if _tokens(shard) is None]
    write = functools.partial(_write_shard, texts=texts, tokenizer=tokenizer.backend_tokenizer, end=tokenizer.eos_token_id)
    # The processes are the parallelism.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Spawned, because a fork of a process with threads, such as the tokenizer's, may hang.
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_end_with_parent) as pool,
        tqdm(total=len(shards), initial=len(shards) - len(missing), unit="shard", desc=f"{len(texts):,} documents") as progress,
    ):
        try:
            for _ in pool.map(write, missing, [shards[index] for index in missing]):
                progress.update()
        except concurrent.futures.process.BrokenProcessPool as error:
            raise PreparationError(
                f"a process was killed, perhaps for lack of memory: start again with fewer than --workers {workers}. What is "
                "finished stays."
            ) from error


def _end_with_parent() -> None:
    """Makes a worker end when the program is killed, instead of waiting for work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _write_shard(index: int, shard: Path, texts: "datasets.Dataset", tokenizer: "tokenizers.Tokenizer", end: int) -> None:
    documents = texts.select(range(index * _SHARD, min((index + 1) * _SHARD, len(texts))))
    (column,) = texts.column_names
    with _writing(shard, tokenizer.get_vocab_size()) as builder:
        for batch in documents.iter(_BATCH):
            for encoding in tokenizer.encode_batch_fast([text or "" for text in batch[column]], add_special_tokens=False):
                tokens = [*encoding.ids, end]
                builder.add_document(tokens, [len(tokens)])


@contextlib.contextmanager
def _writing(prefix: Path, vocabulary: int) -> Iterator[IndexedDatasetBuilder]:
    """Lends the builder of a dataset, which gets its name only when it is whole, and its index last."""
    partial = f"{prefix}.partial"
    builder = IndexedDatasetBuilder(get_bin_path(partial), dtype=DType.optimal_dtype(vocabulary))
    yield builder
    builder.finalize(get_idx_path(partial))
    os.replace(get_bin_path(partial), get_bin_path(str(prefix)))
    os.replace(get_idx_path(partial), get_idx_path(str(prefix)))


def _tokens(prefix: Path) -> int | None:
    """Number of tokens of a dataset, or None if it is absent, or was not all on disk when the machine went down."""
    if not Path(get_idx_path(str(prefix))).exists():
        return None
    dataset = IndexedDataset(str(prefix))
    tokens = int(dataset.sequence_lengths.sum(dtype="int64"))
    is_whole = Path(get_bin_path(str(prefix))).stat().st_size == tokens * dataset.index.dtype_size
    return tokens if is_whole else None


if __name__ == "__main__":
    main()
