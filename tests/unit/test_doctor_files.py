"""Folders that a job names, as the doctor sees them."""

import os
from pathlib import Path

import pytest

from pier_megatron.commands.doctor import job_files
from pier_megatron.commands.findings import Findings
from pier_megatron.exchange.authentication import new_secret


def look(arguments: str) -> Findings:
    findings = Findings()
    job_files.look(job_files.paths(f"--mock-data {arguments}".split()), findings)
    return findings


def test_folders_that_may_not_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look(f"--save {tmp_path}").verdict == look(f"--save {tmp_path / 'new'} --load {tmp_path / 'new'}").verdict == "OK"
    # root may write everywhere; other users may not.
    monkeypatch.setattr(os, "access", lambda path, mode, effective_ids=False: False)
    for folder in (tmp_path, tmp_path / "new"):
        refusal = f"--save {folder}: this user cannot write to {tmp_path}. Give another folder."
        assert look(f"--save {folder}").errors == [refusal]
    assert look(f"--load {tmp_path}").errors == [f"--load {tmp_path}: may not be read by you."]


def test_object_stores_and_flags_without_their_values_are_left_alone() -> None:
    assert look("--save s3://bucket/run --load s3://bucket/run").verdict == look("--save").verdict == "OK"


@pytest.mark.parametrize(
    ("words", "prefixes"),
    [("0.3 a 0.7 b", ["a", "b"]), ("1 a 1 b 1 c", ["a", "b", "c"]), ("a b", ["a", "b"]), ("1 2 3", ["1", "2", "3"])],
)
def test_weights_of_a_blend_are_no_datasets(words: str, prefixes: list[str]) -> None:
    findings = Findings()
    job_files.look(job_files.paths(["--data-path", *words.split()]), findings)
    assert [error.split(":")[0] for error in findings.errors] == [f"--data-path {prefix}" for prefix in prefixes]


def test_secret_that_an_island_would_refuse(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    [warning] = look(f"--pier-secret-file {secret}").warnings
    assert "the node of the island's first rank needs it" in warning
    new_secret(secret)
    assert look(f"--pier-secret-file {secret}").verdict == "OK"
    secret.chmod(0o644)
    [error] = look(f"--pier-secret-file {secret}").errors
    assert f"Run chmod 600 {secret}" in error


@pytest.mark.parametrize("text", ["[]", '"words"', '{"train": 3}', "{"])
def test_lists_of_data_that_are_none(text: str, tmp_path: Path) -> None:
    lists = tmp_path / "lists.json"
    lists.write_text(text)
    findings = Findings()
    job_files.look(job_files.paths(["--per-split-data-args-path", str(lists)]), findings)
    [error] = findings.errors
    assert error.startswith(f"--per-split-data-args-path {lists}: cannot be read (")
