"""Shards: many rows of a few arrays on disk, a `.npy` file per array and shard, each with a checksum.

A shard is complete on disk before anybody is told of it; what is damaged is noticed before it is used.
Files are mapped only while they are read: neither memory nor open files grow with the data.
"""

import io
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int64, Shaped

from machinery.files import UserError, is_writer, write_safely

Layout = dict[str, tuple[str, tuple[int, ...]]]  # by array: the type and the shape of one row


def bytes_per_row(layout: Layout) -> int:
    return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in layout.values())


@dataclass(frozen=True)
class Shard:
    """What is known about a shard."""

    rows: int
    files: dict[str, tuple[int, int]]  # size and checksum of each array's file
    left_out: dict[str, int]  # rows that were not stored, by reason
    rounding: dict[str, float]  # the largest absolute error of each array that was stored shorter

    @staticmethod
    def parse(content: Any) -> "Shard":
        files = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
        left_out = {str(name): int(count) for name, count in content["left_out"].items()}
        rounding = {str(name): float(error) for name, error in content["rounding"].items()}
        return Shard(int(content["rows"]), files, left_out, rounding)


def array_file(directory: Path, number: int, name: str) -> Path:
    return directory / f"shard-{number:05d}-{name}.npy"


def write_shard(
    directory: Path,
    number: int,
    arrays: dict[str, Shaped[np.ndarray, "rows ..."]],
    left_out: dict[str, int],
    rounding: dict[str, float],
) -> Shard:
    files = {n: write_array(array_file(directory, number, n), x) for n, x in arrays.items()}
    return Shard(len(next(iter(arrays.values()))), files, left_out, rounding)


def check_shard(directory: Path, number: int, layout: Layout, shard: Shard) -> dict[str, int]:
    """Checks all files of a shard; returns where the numbers begin in each."""
    return {
        name: _check_array(
            array_file(directory, number, name), dtype, (shard.rows, *shape), *shard.files[name]
        )
        for name, (dtype, shape) in layout.items()
    }


def load_column(directory: Path, shards: int, name: str) -> Shaped[np.ndarray, "rows ..."]:
    """One array of all shards, in memory."""
    return np.concatenate([np.load(array_file(directory, i, name)) for i in range(shards)])


@dataclass(frozen=True)
class Rows:
    """Checked shards, to be read row by row."""

    directory: Path
    layout: Layout
    shards: list[Shard]
    begins: list[dict[str, int]]  # per shard: where the numbers begin in each file

    @staticmethod
    def open(directory: Path, layout: Layout, shards: list[Shard]) -> "Rows":
        begins = [check_shard(directory, i, layout, shard) for i, shard in enumerate(shards)]
        return Rows(directory, layout, shards, begins)

    @property
    def first(self) -> Int64[np.ndarray, " shards"]:
        """The index of each shard's first row."""
        return np.cumsum([0] + [shard.rows for shard in self.shards])[:-1]

    def read(self, name: str, rows: Int64[np.ndarray, " n"]) -> Shaped[np.ndarray, "n ..."]:
        """Some rows of one array, in the order in which they are asked for."""
        dtype, shape = self.layout[name]
        first = self.first
        shard = np.searchsorted(first, rows, side="right") - 1
        read = np.empty((len(rows), *shape), dtype)
        for number in np.unique(shard).tolist():
            here = shard == number
            path = array_file(self.directory, number, name)
            whole = (self.shards[number].rows, *shape)
            mapped = np.memmap(path, dtype, "r", self.begins[number][name], whole)
            read[here] = mapped[rows[here] - first[number]]
        return read


def write_array(path: Path, array: Shaped[np.ndarray, "..."]) -> tuple[int, int]:
    """Writes a `.npy` file; returns its size and checksum."""
    array = np.ascontiguousarray(array)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    blocks = header.getvalue(), array.reshape(-1).view(np.uint8).data
    if is_writer():
        with write_safely(path) as file:
            for block in blocks:
                file.write(block)
    return sum(map(len, blocks)), zlib.crc32(blocks[1], zlib.crc32(blocks[0]))


def _check_array(path: Path, dtype: str, shape: tuple[int, ...], size: int, checksum: int) -> int:
    """Compares a `.npy` file with what is known about it; returns where its numbers begin.

    Size and checksum come first: nothing damaged reaches NumPy, and nothing large is allocated.
    """
    advice = "building the dataset again replays what is damaged."
    try:
        with open(path, "rb") as file:
            found = file.seek(0, io.SEEK_END)
            if found != size:
                raise UserError(f"{path} is damaged: {found} bytes instead of {size}; {advice}")
            file.seek(0)
            computed = 0
            while block := file.read(1 << 20):
                computed = zlib.crc32(block, computed)
            if computed != checksum:
                raise UserError(f"{path} is damaged: its checksum does not fit; {advice}")
            file.seek(0)
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0(file)
            begin = file.tell()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; {advice}") from None
    except UserError:
        raise
    except Exception as error:  # NumPy's parser of headers raises nearly anything
        raise UserError(f"{path} is not a NumPy array: {error}.") from None
    numbers = np.dtype(dtype).itemsize * math.prod(shape)
    if (version, header, begin) != ((1, 0), (shape, False, np.dtype(dtype)), size - numbers):
        raise UserError(f"{path} does not hold {dtype}{list(shape)}, as meta.json says.")
    return begin
