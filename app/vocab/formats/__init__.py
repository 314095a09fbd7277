"""Catalogue files of Widebeam and of other systems, by name. A new format is a file here and an entry below."""

from app.vocab.formats import flashrec, index_json, jsonl, npy, nvidia_jsonl, openonerec, xllm
from app.vocab.formats.source import Format

FORMATS = {
    "jsonl": Format(jsonl.read, "line"),
    "index-json": Format(index_json.read, "item"),
    "openonerec": Format(openonerec.read, "item"),
    "flashrec": Format(flashrec.read, "item"),
    "nvidia-jsonl": Format(nvidia_jsonl.read, "line"),
    "xllm": Format(xllm.read, "record"),
    "npy": Format(npy.read, "row", first=0),
}
