"""A machine that looks like an inf2 to the hardware suite: packages of the pinned releases, cores that are taken by one
process, a compile cache. Underneath is the emulated device.

It rehearses what only happens on hardware: the worker processes, the order of the tests, the result file.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from reference_engine.runners.neuron.detect import PINS

FILES = {
    "cores.py": """
        import fcntl
        import os

        held = []


        def take():
            if not held:
                file = open(os.environ["REHEARSAL_CORES"], "w")
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise RuntimeError("NeuronCores are not available: requested 2, available 0") from None
                held.append(file)
        """,
    "libneuronxla.py": "",
    "neuronxcc.py": "",
    "torch_neuronx.py": """
        import warnings

        import cores


        def trace(module, example, compiler_args):
            import torch

            assert compiler_args == ["--auto-cast", "none", "-O1"]
            cores.take()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return torch.jit.trace(module, example)
        """,
    "transformers_neuronx/__init__.py": """
        import torch_neuronx
        from reference_engine.runners.neuron.emulated import site_path

        __path__ = [*__path__, str(site_path() / "transformers_neuronx")]
        """,
    "transformers_neuronx/llama/__init__.py": "",
    "transformers_neuronx/llama/model.py": """
        import itertools
        import os
        import types

        import cores
        from reference_engine.runners.neuron import driver
        from reference_engine.runners.neuron.emulated.model import LlamaForSampling as Emulated

        driver.time = types.SimpleNamespace(perf_counter=itertools.count().__next__)  # a call takes one second


        class LlamaForSampling(Emulated):
            def to_neuron(self):
                assert os.environ["NEURON_CC_FLAGS"] == "--optlevel 1 --auto-cast=none"
                print("Compiler status PASS", flush=True)  # the real one prints to standard output as well
                cores.take()
                super().to_neuron()
                self.save(os.environ["NEURON_COMPILE_CACHE_URL"])
        """,
    "rehearsed.py": """
        from reference_engine.runners.neuron import detect

        PRESENCE = detect.Presence(reason=None, devices=("neuron0",), cores=2, instance_type="inf2.xlarge")
        detect.find = lambda host=None: PRESENCE
        """,
}


def build(folder: Path) -> dict[str, str]:
    """Write the machine to ``folder``; returns the environment variables that make it seen."""
    site = folder / "site"
    for name, text in FILES.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    for name, release in PINS.items():
        path = site / f"{name.replace('-', '_')}-{release}.dist-info" / "METADATA"
        path.parent.mkdir()
        path.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n", encoding="utf-8")
    return {
        "PYTHONPATH": str(site),
        "REHEARSAL_CORES": str(folder / "cores"),
        "NEURON_COMPILE_CACHE_URL": str(folder / "compile-cache"),
        "NEURON_RT_VISIBLE_CORES": "0-1",
        "OMP_NUM_THREADS": "1",
    }
