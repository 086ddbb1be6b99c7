"""Who else generates on this machine, each in processes of its own with one thread: transformers, llama.cpp over RPC.

Decides how they are told and timed. llama.cpp is `llama-cpp-python` built from source with RPC in an environment of its
own; that holds `gguf`, `safetensors` and the server `ggml-rpc-server` too. Neighbours: `serving` compares.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

TRANSFORMERS: Final = """
import sys, time, torch, transformers
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
class Clock(transformers.generation.streamers.BaseStreamer):
    def put(self, value): self.at.append(time.perf_counter())
    def end(self): pass
print("up", flush=True)
for line in sys.stdin:
    tokens, *prompt = map(int, line.split())
    clock = Clock(); clock.at = []
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
                             eos_token_id=None, pad_token_id=0, streamer=clock)
    at = clock.at[1:]
    print((len(at) - 1) / (at[-1] - at[0]), *out[0, len(prompt):].tolist(), flush=True)
"""

GGUF: Final = """
import json, pathlib, sys
import gguf, numpy as np
from safetensors.numpy import load_file
model, target = map(pathlib.Path, sys.argv[1:])
config = json.loads((model / "config.json").read_text())
heads, kv_heads, vocabulary = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "vocab_size"))
out = gguf.GGUFWriter(target, "llama")
out.add_context_length(config["max_position_embeddings"])
out.add_embedding_length(config["hidden_size"])
out.add_block_count(config["num_hidden_layers"])
out.add_feed_forward_length(config["intermediate_size"])
out.add_head_count(heads)
out.add_head_count_kv(kv_heads)
out.add_rope_dimension_count(config["hidden_size"] // heads)
out.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
out.add_layer_norm_rms_eps(config["rms_norm_eps"])
out.add_vocab_size(vocabulary)
out.add_file_type(gguf.LlamaFileType.ALL_F32)
# Names nobody reads: tokens go in and out as numbers.
out.add_tokenizer_model("llama")
out.add_token_list([b"<unk>", b"<s>", b"</s>"] + [f"t{n}".encode() for n in range(3, vocabulary)])
out.add_token_scores([0.0] * vocabulary)
out.add_token_types([2, 3, 3] + [1] * (vocabulary - 3))
names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
for file in sorted(model.glob("*.safetensors")):
    for name, data in load_file(file).items():
        data = data.astype(np.float32)
        for part, count in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name:  # llama.cpp rotates neighbours, transformers halves
                data = data.reshape(count, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
        out.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(data))
out.write_header_to_file(); out.write_kv_data_to_file(); out.write_tensors_to_file(); out.close()
"""
LLAMA_CPP: Final = """
import ctypes, pathlib, sys, time
import numpy as np, llama_cpp
from llama_cpp import Llama
path, context, *endpoints = sys.argv[1:]
libraries = pathlib.Path(llama_cpp.__file__).parent / "lib"
if endpoints:
    rpc, registry = (ctypes.CDLL(str(libraries / f"lib{name}.so")) for name in ("ggml-rpc", "ggml"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    registry.ggml_backend_register.argtypes = [ctypes.c_void_p]
    for endpoint in endpoints:
        found = rpc.ggml_backend_rpc_add_server(endpoint.encode())
        assert found, f"no RPC server at {endpoint}"
        registry.ggml_backend_register(found)
# Key-value caches in the precision of ours, one thread, every layer at the servers if there are any.
model = Llama(path, n_ctx=int(context), n_threads=1, n_threads_batch=1, n_gpu_layers=-1 if endpoints else 0,
              type_k=0, type_v=0, flash_attn=False, verbose=True)
print("up", flush=True)
for line in sys.stdin:
    tokens, *prompt = map(int, line.split())
    model.reset()
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(model.ctx), True)
    model.eval(prompt)
    answer, at = [], []
    while True:
        row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), (model.n_vocab(),))
        answer.append(int(row.argmax())); at.append(time.perf_counter())
        if len(answer) == tokens: break
        model.eval(answer[-1:])
    print((len(at) - 1) / (at[-1] - at[0]), *answer, flush=True)
"""
START_S: Final = 20.0


class Rival:
    """A process that is told `TOKENS PROMPT...` and answers `TOKENS-PER-SECOND ANSWER...`, line by line; it says `up`
    when it is ready. Raises `SystemExit` with what it said last when it ends."""

    def __init__(self, arguments: Sequence[str | Path], log: Path) -> None:
        self._log_path = log
        self._log = log.open("w+b")
        self._process = subprocess.Popen(
            list(map(str, arguments)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        while self._hear() != "up":
            pass

    def generate(self, prompt: Sequence[int], tokens: int) -> tuple[float, tuple[int, ...]]:
        """(tokens per second from the first to the last, the answer)"""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, (tokens, *prompt))) + "\n")
        self._process.stdin.flush()
        speed, *answer = self._hear().split()
        return float(speed), tuple(map(int, answer))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-5:]
            raise SystemExit("a rival's process ended without an answer: " + " | ".join(said))
        return line.strip()


def transformers_rival(model: Path, folder: Path) -> Rival:
    return Rival([sys.executable, "-c", TRANSFORMERS, model], folder / "transformers.log")


@contextmanager
def llama_cpp_rivals(
    venv: Path, model: Path, folder: Path, *, servers: int, context: int
) -> Iterator[dict[str, Rival]]:
    """`alone`: llama.cpp in one process; `rpc`: the same with all layers on so many RPC servers on loopback."""
    python, server = venv / "bin" / "python", venv / "bin" / "ggml-rpc-server"
    weights = folder / "model.gguf"
    subprocess.run([str(python), "-c", GGUF, str(model), str(weights)], check=True)
    with ExitStack() as stack:
        endpoints = [stack.enter_context(_rpc_server(server, folder / f"rpc-{n}.log")) for n in range(servers)]
        rivals: dict[str, Rival] = {}
        for name, reached in (("alone", []), ("rpc", endpoints)):
            program = [python, "-c", LLAMA_CPP, weights, str(context), *reached]
            rivals[name] = Rival(program, folder / f"llama-cpp-{name}.log")
            stack.callback(rivals[name].close)
        yield rivals


@contextmanager
def _rpc_server(program: Path, log: Path) -> Iterator[str]:
    """Its address, once it listens there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as said:
        process = subprocess.Popen(
            [str(program), "-H", "127.0.0.1", "-p", str(port), "-t", "1", "-d", "CPU"], stdout=said, stderr=said,
            env={**os.environ, "LD_LIBRARY_PATH": _libraries(program)},
        )  # fmt: skip
        try:
            until_s = time.monotonic() + START_S
            while time.monotonic() < until_s and process.poll() is None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
                time.sleep(0.05)
            else:
                raise SystemExit(f"{program} does not listen: {log.read_text(errors='replace')[-500:]}")
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _libraries(program: Path) -> str:
    """Where the package has llama.cpp's libraries, which the server was linked with."""
    found = next(program.parent.parent.glob("lib/python*/site-packages/llama_cpp/lib"), None)
    if found is None:
        raise SystemExit(f"no llama_cpp in {program.parent.parent}")
    return str(found)
