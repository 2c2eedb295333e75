"""Protocol 2 by straight code, for one input and one output: a session's looks and checks, without words for errors."""

import fcntl
import json
import math
import os
import struct
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

from shm_backend_utils.errors import StaleRequestError
from shm_backend_utils.memory.handover.fetching import Fetcher
from shm_backend_utils.model.config import Config
from shm_backend_utils.model.mapping import policy
from shm_backend_utils.model.triton import TritonBackend
from shm_backend_utils.protocol.parameters import parse_address

FLOCK = struct.Struct("hhqqi4x")
TABLE = struct.Struct("<QIHHHHHHQ")
TENSOR = struct.Struct("<QQHBBHH")
RESULTS = struct.Struct("<IHHQQHBBHHQQ8s")
OWNERS = FLOCK.pack(fcntl.F_WRLCK, 0, 0, 1, 0)
FREE = FLOCK.pack(fcntl.F_UNLCK, 0, 0, 1, 0)[:2]
PAGE, FP32 = 4096, 11


class Slot:
    def __init__(self, text, config, fetcher):
        address = parse_address(text)
        self.region = policy.open_managed(address.key, address.token, config, fetcher, "shm_slot")
        self.fd, self.array = self.region.segment.fileno(), self.region.bytes()
        header, buffer = self.region.header, self.region.buffer()
        self.byte_size, self.data_begin = header.byte_size, self.region.data_offset
        begin, half = PAGE + address.slot * header.record_byte_size, header.record_byte_size // 2
        self.table, self.results = buffer[begin : begin + half], buffer[begin + half : begin + 2 * half]
        self.client_words, self.model_words = self.table.cast("Q"), self.results.cast("Q")
        self.take = FLOCK.pack(fcntl.F_WRLCK, 0, begin, 1, 0)
        self.give_back = FLOCK.pack(fcntl.F_UNLCK, 0, begin, 2, 0)
        self.lock = threading.Lock()


class TritonPythonModel:
    def initialize(self, args):
        self.backend = TritonBackend()  # for what is not timed
        self.config, self.fetcher = Config.from_config(json.loads(args["model_config"])), Fetcher(1.0)
        self.slots = {}
        self.times_ns = []

    def execute(self, requests):
        if requests[0].inputs():
            return [pb_utils.InferenceResponse([self.backend.output("TIMES_NS", np.array(self.times_ns, np.int64))])]
        begin = time.perf_counter_ns()
        try:
            responses = [self.answer(request) for request in requests]
        except Exception as error:
            return [self.backend.error_response(error)]  # as the client asks first whether it can share memory
        self.times_ns.append(time.perf_counter_ns() - begin)
        return responses

    def answer(self, request):
        parameters = json.loads(request.parameters())
        address, generation = parameters["shm_slot"], parameters["shm_generation"]
        slot = self.slots.get(address)
        if slot is None:
            slot = self.slots[address] = Slot(address, self.config, self.fetcher)
        status = os.fstat(slot.fd)
        if not status.st_nlink and fcntl.fcntl(slot.fd, fcntl.F_OFD_GETLK, OWNERS).startswith(FREE):
            raise ValueError("gone")
        if status.st_size < slot.byte_size or status.st_blocks * 512 < slot.byte_size:
            raise ValueError("truncated")
        if slot.client_words[0] != generation:
            raise StaleRequestError("stale")
        if not slot.lock.acquire(False):
            raise ValueError("busy")
        try:
            fcntl.fcntl(slot.fd, fcntl.F_OFD_SETLK, slot.take)
            try:
                self.run(request, slot, generation)
                response = pb_utils.InferenceResponse([])
                slot.model_words[1] = generation
            finally:
                fcntl.fcntl(slot.fd, fcntl.F_OFD_SETLK, slot.give_back)
        finally:
            slot.lock.release()
        return response

    def run(self, request, slot, generation):  # straight code
        data = bytes(slot.table)
        found, length, input_count, output_count, regions, frames, _, probe, _ = TABLE.unpack_from(data)
        if found != generation:
            raise StaleRequestError("stale")
        if length > len(data) or input_count != 1 or output_count != 1 or regions or frames or probe:
            raise ValueError("table")
        inputs, rooms, at, reach = {}, {}, TABLE.size, 0
        for is_input in (True, False):
            begin = at + TENSOR.size
            if begin > length:
                raise ValueError("length")
            offset, size, region, number, rank, name_length, flags = TENSOR.unpack_from(data, at)
            name_begin = begin + 8 * rank
            name_end = name_begin + name_length
            if rank > 32 or name_end > length or region or flags:
                raise ValueError("tensor")
            if not slot.data_begin <= offset <= slot.byte_size - size or offset < reach or offset % 4:
                raise ValueError("offset")
            reach = offset + size
            name = data[name_begin:name_end].decode()
            if is_input:
                shape = struct.unpack_from(f"<{rank}Q", data, begin)
                if name != "X0" or number != FP32 or rank != 2 or math.prod(shape) * 4 != size:
                    raise ValueError("input")
                inputs[name] = shape, offset
            elif name != "Y0" or number or rank:
                raise ValueError("output")
            else:
                rooms[name] = offset, size
            at = name_end + -name_length % 8
        if at != length or slot.model_words[0] >= generation:
            raise ValueError("length, or replayed")
        slot.model_words[0] = generation
        shape, offset = inputs["X0"]
        x = np.ndarray(shape, np.float32, slot.array, offset)
        x.flags.writeable = False
        offset, room = rooms["Y0"]
        if x.nbytes > room or "Y0" not in request.requested_output_names():
            raise ValueError("room")
        y = np.ndarray(shape, np.float32, slot.array, offset)
        np.copyto(y, x)
        RESULTS.pack_into(slot.results, 16, 72, 1, 0, offset, y.nbytes, 0, FP32, 2, 2, 0, *shape, b"Y0")
