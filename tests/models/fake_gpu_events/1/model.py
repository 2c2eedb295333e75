"""The model `fake_gpu`, with events. One of its outputs has a name so long that it fills a slot's record."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "fake_gpu"))

import deeds


class TritonPythonModel(deeds.TritonPythonModel):
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "Y" * 3800, "data_type": "TYPE_FP32", "dims": [-1]})
        return config
