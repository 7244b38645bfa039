"""``examples/prepare_openwebtext.py``: text in, tokens in Megatron's format out, whatever happens on the way."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from launch import REPOSITORY, execute

pytestmark = pytest.mark.processes

_SCRIPT = REPOSITORY / "examples" / "prepare_openwebtext.py"
_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_END = "<|endoftext|>"

# More than four shards, so that some are there and some are not when the work is interrupted.
_DOCUMENTS = [
    f"{number}: {word} and\n\tπ ≈ 3, {word * (number % 7)}" for number in range(45) for word in ("tensor", "naïve")
] * 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in every format, tokenizers, and a cache of its own."""
    import tokenizers
    import transformers
    from datasets import Dataset

    folder = tmp_path_factory.mktemp("preparation")
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in _DOCUMENTS))
    Dataset.from_dict({"body": ["one", "", "three"]}).to_parquet(folder / "three.parquet")
    (folder / "books").mkdir()
    for name, text in (("a", "first\n\nbook\n"), ("b", "second")):
        (folder / "books" / f"{name}.txt").write_text(text)
    (folder / "empty").mkdir()
    (folder / "damaged.jsonl").write_text('{"text": "whole"}\n{"text": ')
    trained = tokenizers.ByteLevelBPETokenizer()
    for size, name in ((300, "tokenizer"), (290, "smaller")):
        trained.train_from_iterator(_DOCUMENTS[:90], vocab_size=size, special_tokens=[_END], show_progress=False)
        backend = tokenizers.Tokenizer.from_str(trained.to_str())
        transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END).save_pretrained(folder / name)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder / "endless")
    return folder


def command(folder: Path, files: str, output: str, *flags: str) -> list[str]:
    inputs = ["--files", str(folder / files), "--tokenizer", str(folder / "tokenizer"), "--output", str(folder / output)]
    return [sys.executable, str(_SCRIPT), *inputs, "--workers", "1", *flags]


def environment(folder: Path) -> dict[str, str]:
    return _OFFLINE | {"HF_HOME": str(folder / "cache")}


def documents(output: Path) -> Iterator[str]:
    """Texts of a prepared dataset, decoded by the tokenizer in the same folder."""
    import transformers
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokenizer = transformers.AutoTokenizer.from_pretrained(output / "tokenizer")
    # Most documents are there many times.
    text_of = functools.cache(lambda tokens: tokenizer.decode(list(tokens)))
    for tokens in IndexedDataset(str(output / "text")):
        assert tokens[-1] == tokenizer.eos_token_id
        yield text_of(tuple(tokens[:-1].tolist()))


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> int:
    """Number of shards that were written when the work into ``whole`` was killed; some are damaged now."""
    shards = folder / "whole" / "shards"
    # Started by itself: only the program is killed, and has to take its workers with it.
    variables = os.environ | environment(folder) | {"PIER_TEST_WARM": ""}
    with (folder / "killed.txt").open("w") as log:
        process = subprocess.Popen(command(folder, "text.jsonl", "whole"), env=variables, stdout=log, stderr=log)
        while not (shards / "000000.idx").exists():
            assert process.poll() is None, (folder / "killed.txt").read_text()
            time.sleep(0.01)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
    written = sorted(path.name for path in shards.glob("*[0-9].idx"))
    assert 1 <= len(written) < 5
    assert not (folder / "whole" / "text.idx").exists()
    # What a machine leaves that goes down with the last bytes in its caches, and a process that is killed as it writes.
    with (shards / "000000.bin").open("r+b") as file:
        file.truncate(100)
    (shards / "000003.partial.bin").write_bytes(b"torn")
    return len(written)


@pytest.fixture(scope="module")
def whole(folder: Path, interrupted: int) -> str:
    """What is printed when the work goes on after that; the output is in ``whole``."""
    return execute(command(folder, "text.jsonl", "whole"), folder / "whole.txt", **environment(folder))


def test_tokens_are_the_text(folder: Path, whole: str) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    assert list(documents(folder / "whole")) == _DOCUMENTS
    dataset = IndexedDataset(str(folder / "whole" / "text"))
    assert dataset.index.dtype == np.uint16
    assert f"{len(_DOCUMENTS):,} documents, {dataset.sequence_lengths.sum():,} tokens" in whole
    assert f"--data-path {folder}/whole/text --tokenizer-type HuggingFaceTokenizer" in whole
    assert f"--tokenizer-model {folder}/whole/tokenizer --vocab-size 300" in whole
    assert sorted(path.name for path in (folder / "whole").iterdir()) == ["settings.json", "text.bin", "text.idx", "tokenizer"]


def test_started_again_it_writes_what_is_missing_or_damaged(interrupted: int, whole: str) -> None:
    assert f"{interrupted - 1}/5" in whole


# Flags, and words of their refusal: which flag, which values, what to do.
_REFUSED = {
    "--files {folder}/empty": ["--files", "/empty: no .txt", "file there"],
    "--files {folder}/text.jsonl {folder}/three.parquet": ["json, parquet files together", "Give files of one kind"],
    "--files {folder}/three.parquet": ["--text-column text", "the records have body"],
    "--files {folder}/damaged.jsonl": ["--files 1 files", "cannot be read"],
    "--tokenizer {folder}/none": ["--tokenizer", "/none cannot be loaded", "tokenizer.json"],
    "--tokenizer {folder}/endless": ["/endless has no end-of-text token", "eos_token"],
    "--workers 0": ["--workers 0", "1 or more"],
    "--output {folder}/whole --tokenizer {folder}/smaller": [
        "/whole holds data of other settings",
        "--tokenizer: 300 tokens",
        "290 tokens",
        "Give another --output, or delete that folder",
    ],
    "--output {folder}/whole --files {folder}/books": ["--files: 1 files", "2 files", "documents: 45000 there, 2 now"],
}

# For what ends before any tokenizing, and for two small inputs.
_MANY = Path(__file__).with_name("many_preparations.py")


@pytest.fixture(scope="module")
def said(folder: Path, whole: str) -> dict[str, tuple[int, str]]:
    cases = {flags: command(folder, "text.jsonl", "refused", *flags.format(folder=folder).split())[1:] for flags in _REFUSED}
    cases["parquet"] = command(folder, "three.parquet", "three", "--text-column", "body")[1:]
    cases["txt"] = command(folder, "books", "library")[1:]
    process = subprocess.run(
        [sys.executable, str(_MANY)],
        env=os.environ | environment(folder) | {"PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{_SCRIPT.parent}"},
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
    )
    assert "SAID " in process.stdout, process.stderr
    return dict(zip(cases, map(tuple, json.loads(process.stdout.split("SAID ")[1])), strict=True))


@pytest.mark.parametrize("flags", _REFUSED)
def test_bad_input(said: dict[str, tuple[int, str]], flags: str) -> None:
    status, text = said[flags]
    assert status == 2
    for part in _REFUSED[flags]:
        assert part in text


def test_other_formats(folder: Path, said: dict[str, tuple[int, str]]) -> None:
    assert said["parquet"][0] == said["txt"][0] == 0
    assert "WARNING: 3 documents" in said["parquet"][1]
    assert list(documents(folder / "three")) == ["one", "", "three"]
    assert list(documents(folder / "library")) == ["first\n\nbook\n", "second"]
