"""`product.cu`, its very text, on a CPU: C++ is made of it where it is assembler (`cluster.h`). Blocks run in turn."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from app.ops.gated.product import SOURCE

COMPILER = shutil.which("g++") if sys.platform == "linux" else None  # ucontext.h is glibc's
_SECTIONS = (
    ("struct __align__(64) Map {", "// A place of the ring"),  # what cluster.h has
    ("// part:", "#define THREADS"),
)
_PRELUDE = (SOURCE.parents[1] / "prelude" / "warpgroup.cuh").read_text("utf-8")
_TURNED = _PRELUDE[_PRELUDE.index("// Words j of four lanes") :]
_MAIN = r"""
static std::vector<u16> read(const char* name) {
    FILE* f = fopen(name, "rb");
    fseek(f, 0, SEEK_END);
    std::vector<u16> x(ftell(f) / 2);
    rewind(f);
    if (fread(x.data(), 2, x.size(), f) != x.size()) wrong("a file that cannot be read");
    fclose(f);
    return x;
}

int main(int, char** given) {
    const i64 rows = atoll(given[1]), width = atoll(given[2]), depth = atoll(given[3]);
    gridDim.x = atoi(given[4]), chance.seed(atoi(given[5]));
    const std::vector<u16> x = read("x"), weight = read("weight");
    const Map maps[2] = {{x.data(), rows, depth}, {weight.data(), 2 * width, depth}};
    const i64 more = BLOCKS * ROWS * width;  // behind out, where rows of the last tiles would go
    u16* out = (u16*)aligned_alloc(16, (rows * width + more) * 2);
    memset(out, 0xff, (rows * width + more) * 2);
    for (u32 first = 0; first < gridDim.x; first += BLOCKS) {
        std::vector<std::unique_ptr<Block>> own;
        cluster.clear();
        for (u32 rank = 0; rank < BLOCKS; rank++) {
            own.emplace_back(new Block);
            own[rank]->block = first + rank, own[rank]->rank = rank;
            cluster.push_back(own[rank].get());
        }
        run([&] { gated_product(maps[0], maps[1], out, rows, width, depth); });
    }
    for (i64 i = 0; i < more; i++)
        if (out[rows * width + i] != 0xffff) wrong("rows that are not there are written");
    FILE* f = fopen("out", "wb");
    fwrite(out, 2, rows * width, f);
    fclose(f);
}
"""


def translated(text: str) -> str:
    """C++ of the kernel's source: whatever is left of assembler is an error."""
    for first, last in _SECTIONS:
        start = text.index(first)
        text = text[:start] + text[text.index(last, start) :]
    head = text.index("// A place of the ring")
    text = text[:head] + '#include "cluster.h"\n' + _TURNED + text[head:]
    text = text.replace("extern __shared__ char memory[];", "char* memory = now->block->shared.data() + 1040;")
    text = re.sub(r"__shared__ __align__\(8\) u64 cells\[.*\];", "u64* cells = (u64*)now->block->shared.data();", text)
    text = re.sub(r'asm volatile\("(?:fence\.mbarrier_init|setmaxnreg)[^;]*;"[^;]*\);', ";", text)
    text = re.sub(
        r'asm volatile\("bar\.(sync|arrive) %0, 256;" ::"n"\((\w+)\) : "memory"\);', r"bar_\1(\2, 256);", text
    )
    assert "asm" not in text, re.findall(r".*asm.*", text)
    return text + _MAIN


def compiled(folder: Path, *, bf16: bool) -> Path:
    """The kernel as a program."""
    assert COMPILER is not None
    (folder / "kernel.cpp").write_text(translated(SOURCE.read_text("utf-8")))
    options = ("-O1", "-std=c++17", "-w", f"-DBF16={int(bf16)}", f"-I{Path(__file__).parent}")
    subprocess.run([COMPILER, *options, "-o", folder / "kernel", folder / "kernel.cpp"], check=True)
    return folder / "kernel"


def gated_product(program: Path, x: Tensor, weight: Tensor, *, blocks: int, seed: int) -> Tensor:
    """What the program gives. Raises RuntimeError with what it says is wrong."""
    (rows, depth), width = x.shape, len(weight) // 2
    for name, one in (("x", x), ("weight", weight)):
        (program.parent / name).write_bytes(one.contiguous().view(torch.int16).numpy().tobytes())
    given = (str(one) for one in (rows, width, depth, blocks, seed))
    done = subprocess.run([program, *given], cwd=program.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout or f"exit {done.returncode}")
    found = torch.frombuffer(bytearray((program.parent / "out").read_bytes()), dtype=x.dtype)
    return found.view(rows, width)
