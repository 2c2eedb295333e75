"""A client in a process of its own for the bench: requests that are all different, and every answer checked."""

from __future__ import annotations

import gc
import json
import math
import random
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shm_backend_utils.client import CopyWarning, Result, ShmClient
from shm_backend_utils.dtypes import BY_NAME

MODEL: Final = "varied"
NUMBERS: Final = ("UINT8", "INT64", "FP16", "FP32")
STRINGS: Final = "BYTES"
MOST_BYTES: Final = 1 << 18

Array = npt.NDArray[Any]


class RandomRequests:
    """Requests at random to one model; counts answers, wrong ones, and those with an output that found no room."""

    def __init__(self, client: ShmClient) -> None:
        self._client = client
        self._chance = random.Random(12)
        self._bytes = np.frombuffer(self._chance.randbytes(2 * MOST_BYTES), np.uint8)
        self.wrong = self.answers = self.overflowed = 0

    def send(self, count: int) -> None:
        for _ in range(count):
            self._send_one()

    def _send_one(self) -> None:
        chance = self._chance
        types = chance.sample([*NUMBERS, STRINGS], chance.randint(1, 3))
        inputs = {f"X_{name}": self._strings() if name == STRINGS else self._numbers(name) for name in types}
        addend = chance.randrange(100)
        parameters: dict[str, Any] = {"addend": addend}
        for number in range(chance.randrange(3)):
            parameters[f"p{number}"] = chance.choice([chance.random() < 0.5, chance.getrandbits(40), _text(chance)])
        expected = {f"Y{name[1:]}": _expected(array, addend) for name, array in inputs.items()}
        outputs = self._hints(expected)
        with self._client.infer(MODEL, inputs, outputs=outputs, parameters=parameters, path="direct") as result:
            self._check(result, expected)

    def _hints(self, expected: Mapping[str, Array]) -> list[str] | dict[str, int | None]:
        """Name the outputs: without a size, which is to be learned, with the right one, or with too little."""
        chance = self._chance
        if chance.random() < 0.3:
            return list(expected)
        hints: dict[str, int | None] = {}
        for name, array in expected.items():
            size = sum(4 + len(text) for text in array.flat) if array.dtype == object else array.nbytes
            hints[name] = chance.choice([None, size, size, size, size // 2])
        return hints

    def _check(self, result: Result, expected: Mapping[str, Array]) -> None:
        self.answers += 1
        self.overflowed += bool(result.overflowed)
        right = set(result) == set(expected) and all(_are_same(result[name], expected[name]) for name in expected)
        self.wrong += not right

    def _numbers(self, name: str) -> Array:
        """Return up to 256 KiB, every magnitude as likely as any other."""
        chance, dtype = self._chance, BY_NAME[name].numpy
        count = int(math.exp(chance.uniform(0, math.log(MOST_BYTES // dtype.itemsize))))
        rows = chance.randint(1, min(count, 64))
        shape = rows, count // rows
        begin = chance.randrange(MOST_BYTES)
        numbers = self._bytes[begin : begin + shape[0] * shape[1]].astype(dtype)  # small ones, which add up exactly
        return numbers.reshape(shape)

    def _strings(self) -> Array:
        chance = self._chance
        rows, columns = chance.randint(1, 4), chance.randint(1, 10)
        texts = np.empty((rows, columns), object)
        texts[:] = [[_text(chance).encode() for _ in range(columns)] for _ in range(rows)]
        return texts


def _text(chance: random.Random) -> str:
    return "é" * chance.randrange(4) + f"{chance.getrandbits(8 * chance.randint(1, 60)):x}"


def _expected(array: Array, addend: int) -> Array:
    return array if array.dtype == object else np.asarray(array + np.asarray(addend, array.dtype))


def _are_same(result: Array, expected: Array) -> bool:
    return (result.dtype, result.shape) == (expected.dtype, expected.shape) and bool((result == expected).all())


def main(url: str, count: int) -> None:
    """Write a line when warm, wait for one, write one for each hundredth of the requests, and then what was seen."""
    warnings.simplefilter("ignore", CopyWarning)  # what overflows here is meant to
    with ShmClient(url) as client:
        requests = RandomRequests(client)
        requests.send(max(count // 10, 500))
        requests.answers = requests.overflowed = 0
        gc.collect()
        print("warm", flush=True)
        sys.stdin.readline()
        for percent in range(100):
            requests.send(count * (percent + 1) // 100 - count * percent // 100)
            print(percent + 1, flush=True)
        gc.collect()
        seen = {"wrong": requests.wrong, "answers": requests.answers, "overflowed": requests.overflowed}
        print(json.dumps(seen), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
