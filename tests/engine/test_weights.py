import json
import pickle
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from app.config import Limits, SidConfig
from app.core import WeightSpec
from app.engine import safetensors, weights
from app.engine.facts import _transform, weight_facts
from app.engine.families.base import Binding
from app.engine.weights import load, resolve_precision
from app.errors import Fault, Rejected
from app.ops.fp8 import quantise_rows
from tests.engine import tiny
from tests.engine.tiny import CPU
from tests.engine.toy import Toy

Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.layers.1.self_attn.k_norm.weight"


def edit(directory, change):
    """Rewrite the safetensors file after change(tensors)."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def missing(d):
    edit(d, lambda tensors: (tensors.pop(Q), tensors.pop(NORM)))


def extra(d):
    edit(d, lambda tensors: tensors.update({"model.layers.0.adapter.weight": torch.zeros(2)}))


def renamed(d):
    edit(d, lambda tensors: tensors.update({"q.weight": tensors.pop(Q)}))


def wrong_shape(d):
    edit(d, lambda tensors: tensors.update({Q: tensors[Q].t().contiguous()}))


def swapped_between_parts(d):
    """k one head more and v one head less: their concatenation has the right shape."""
    k, v = Q.replace("q_proj", "k_proj"), Q.replace("q_proj", "v_proj")

    def change(tensors):
        tensors[k] = torch.cat([tensors[k], tensors[v][:8]])
        tensors[v] = tensors[v][8:].contiguous()

    edit(d, change)


def wrong_dtype(d):
    edit(d, lambda tensors: tensors.update({Q: tensors[Q].to(torch.int32)}))


def double(d):
    edit(d, lambda tensors: tensors.update({Q: tensors[Q].double()}))


def poison(value):
    def change(d):
        edit(d, lambda tensors: tensors[Q].view(-1).__setitem__(3, value))

    return change


def truncated(d):
    file = d / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def three_bytes_more(d):
    file = d / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0\0\0")


def empty(d):
    (d / "model.safetensors").write_bytes(b"")


def pickled(d):
    (d / "model.safetensors").write_bytes(pickle.dumps({"weight": [1.0] * 100}))


def only_pickles(d):
    (d / "model.safetensors").rename(d / "pytorch_model.bin")


def lying_length(d):
    file = d / "model.safetensors"
    file.write_bytes((1 << 26).to_bytes(8, "little") + file.read_bytes()[8:])


def no_config(d):
    (d / "config.json").unlink()


def config_is_a_list(d):
    (d / "config.json").write_text("[]")


def config_says_it_twice(d):
    text = (d / "config.json").read_text()
    assert "hidden_size" in json.loads(text)
    (d / "config.json").write_text(f'{{"hidden_size": 2, {text.lstrip()[1:]}')


def config_is_no_json(d):
    (d / "config.json").write_text('{"model_type": ')


def split(d):
    """Two files and a right index."""
    tensors = load_file(d / "model.safetensors")
    (d / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, d / file)
    table = {name: file for file, part in parts.items() for name in part}
    (d / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return table


def index_with(change):
    def fault(d):
        table = split(d)
        change(table)
        (d / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))

    return fault


def flipped_index(d):
    split(d)
    file = d / "model.safetensors.index.json"
    data = bytearray(file.read_bytes())
    data[10] ^= 0x80
    file.write_bytes(bytes(data))


def missing_shard(d):
    split(d)
    (d / "b.safetensors").unlink()


def twice(d):
    shutil.copy(d / "model.safetensors", d / "other.safetensors")


INDEX = "model.safetensors.index.json"
FAULTS = [
    (missing, "missing_tensors", "model.safetensors", f"2 missing: `{Q}`, `{NORM}`"),
    (extra, "unknown_tensors", "model.safetensors", "1 unknown to the model: `model.layers.0.adapter.weight`"),
    (renamed, "missing_tensors", "model.safetensors", f"1 missing: `{Q}`"),
    (wrong_shape, "bad_shape", f"model.safetensors: {Q}", "shape [16, 32]; config.json says [32, 16]"),
    (swapped_between_parts, "bad_shape", f"model.safetensors: {Q.replace('q_', 'k_')}", "shape [24, 16]"),
    (wrong_dtype, "bad_dtype", f"model.safetensors: {Q}", "stored as I32"),
    (double, "bad_dtype", f"model.safetensors: {Q}", "stored as F64"),
    (poison(float("nan")), "not_finite", f"model.safetensors: {Q}", "holds 1 NaN or infinite value"),
    (poison(float("-inf")), "not_finite", f"model.safetensors: {Q}", "holds 1 NaN or infinite value"),
    (truncated, "truncated", "model.safetensors", "the tensors end at byte"),
    (three_bytes_more, "bad_safetensors", "model.safetensors", "followed by 3 bytes"),
    (empty, "truncated", "model.safetensors", "0 bytes are no safetensors file"),
    (pickled, "bad_safetensors", "model.safetensors", "not a safetensors file"),
    (only_pickles, "no_weights", "v1", "pickled weights are never read"),
    (lying_length, "truncated", "model.safetensors", "the header says"),
    (no_config, "unreadable", "config.json", "No such file"),
    (config_is_a_list, "bad_json", "config.json", "is no JSON object"),
    (config_is_no_json, "bad_json", "config.json", "is no JSON"),
    (config_says_it_twice, "bad_json", "config.json", "key `hidden_size` is there twice"),
    (flipped_index, "bad_json", INDEX, "is no JSON"),
    (missing_shard, "bad_index", INDEX, "is in no safetensors file here (b.safetensors is named)"),
    (index_with(lambda t: t.pop(Q)), "bad_index", f"a.safetensors: {Q}", "the index does not name this tensor"),
    (index_with(lambda t: t.update({Q: "b.safetensors"})), "bad_index", INDEX, "not in b.safetensors"),
    (twice, "duplicate_tensor", "other.safetensors: lm_head.weight", "also in model.safetensors"),
]


@pytest.mark.parametrize(("fault", "code", "location", "message"), FAULTS)
def test_a_faulty_version_is_refused_with_its_place(fault, code, location, message, tmp_path):
    directory = tiny.write(tmp_path / "v1")
    fault(directory)
    with pytest.raises(Rejected) as caught:
        tiny.engine(directory)
    assert caught.value.code == code
    assert caught.value.location.startswith(location)
    assert message in caught.value.message


def test_values_that_overflow_in_the_engines_dtype_are_refused(tmp_path):
    poison(1e5)(tiny.write(tmp_path))
    tiny.engine(tmp_path)
    with pytest.raises(Rejected, match="as float16 holds 1 NaN or infinite value") as caught:
        tiny.engine(tmp_path, precision="float16")
    assert caught.value.location == f"model.safetensors: {Q}"


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(
    st.integers(0, 40),
    st.sampled_from([0.0, 1.0, 65504.0, 65519.9, 65520.0, 3.3e38, 3.39e38, 3.4e38, torch.inf, torch.nan]),
    st.sampled_from([1, -1]),
)
def test_the_quick_look_at_values_lets_nothing_pass_that_is_not_finite(stored, dtype, place, value, sign):
    values = torch.randn(41)
    values[place] = sign * value
    values = values.to(stored)
    if weights._finite(values, dtype):
        assert torch.isfinite(values.to(dtype)).all()
    else:
        assert abs(float(values[place])) >= torch.finfo(dtype).max or not torch.isfinite(values).all()
    assert weights._finite(torch.zeros(0, dtype=stored), dtype)


def parameters(engine):
    return dict(engine._family.named_parameters())


def test_every_tensor_lies_where_its_binding_says(tmp_path):
    engine = tiny.engine(tiny.write(tmp_path))
    source, bound = load_file(tmp_path / "model.safetensors"), parameters(engine)
    prefix = "model.layers.1.self_attn."
    qkv = torch.cat([source[f"{prefix}{x}_proj.weight"] for x in "qkv"])
    torch.testing.assert_close(bound["blocks.1.qkv"].data, qkv, rtol=0, atol=0)
    norms = torch.cat([source[f"{prefix}q_norm.weight"]] * 4 + [source[f"{prefix}k_norm.weight"]] * 2)
    torch.testing.assert_close(bound["blocks.1.qk_norm"].data, norms, rtol=0, atol=0)
    torch.testing.assert_close(bound["heads.1"].data, source["lm_head.weight"][15:21], rtol=0, atol=0)
    assert {(p.device, p.dtype, p.requires_grad) for p in bound.values()} == {(CPU, torch.float32, False)}


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_every_16_and_32_bit_dtype_is_read(stored, tmp_path):
    tiny.write(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({name: x.to(stored) for name, x in tensors.items()}))
    bound = parameters(tiny.engine(tmp_path, precision="bfloat16"))
    source = load_file(tmp_path / "model.safetensors")
    assert torch.equal(bound["embed"].data, source["model.embed_tokens.weight"].to(torch.bfloat16))


def test_several_files_with_and_without_an_index_give_the_same_engine(tmp_path):
    whole = parameters(tiny.engine(tiny.write(tmp_path / "whole")))
    split(tiny.write(tmp_path / "parts"))
    with_index = parameters(tiny.engine(tmp_path / "parts"))
    (tmp_path / "parts" / INDEX).unlink()
    without = parameters(tiny.engine(tmp_path / "parts"))
    assert all(torch.equal(whole[name], with_index[name]) and torch.equal(whole[name], without[name]) for name in whole)


def test_a_tied_head_may_be_written_twice_if_it_is_the_same(tmp_path):
    tiny.write(tmp_path, tie_word_embeddings=True)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    tiny.engine(tmp_path)
    edit(tmp_path, lambda t: t["lm_head.weight"][7].add_(1e-3))
    with pytest.raises(Rejected, match=r"differs from `model.embed_tokens.weight`") as caught:
        tiny.engine(tmp_path)
    assert (caught.value.code, caught.value.location) == ("untied", "model.safetensors: lm_head.weight")


FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.mark.parametrize(("shape", "size"), [((1 << 62, 0), 0), ((1, 250_000), 1_000_000), ((), 4)])
def test_what_is_not_read_takes_no_time_and_no_memory_whatever_its_shape(shape, size, tmp_path, monkeypatch):
    file = tiny.write(tmp_path) / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, end = json.loads(data[8 : 8 + length]), len(data) - 8 - length
    header[FREQUENCIES] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + data[8 + length :] + bytes(size)
    file.write_bytes(whole)
    monkeypatch.setattr(safetensors, "CHUNK", 1 << 15)
    asked = []
    real = safetensors._Beside.memory
    monkeypatch.setattr(safetensors._Beside, "memory", lambda self, size: (asked.append(size), real(self, size))[1])
    assert FREQUENCIES in tiny.engine(tmp_path).unread
    assert max(asked) <= max(1 << 15, len(text))
    assert sum(asked) >= len(whole)


def test_an_untied_head_must_be_there(tmp_path):
    tiny.write(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(Rejected, match=r"1 missing: `lm_head.weight`"):
        tiny.engine(tmp_path)


def test_files_truncated_after_loading_do_not_matter(tmp_path):
    engine = tiny.engine(tiny.write(tmp_path))
    arena = engine.new_arena(tiny.LIMITS)
    before = engine.encode(tiny.contexts(engine, [(3, 4, 5)]), arena).logits.clone()
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate(0)
    assert torch.equal(engine.encode(tiny.contexts(engine, [(3, 4, 5)]), arena).logits, before)


def test_precision_names_a_dtype():
    assert resolve_precision("auto", CPU) == torch.float32
    assert resolve_precision("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_precision("float16", CPU) == torch.float16
    assert resolve_precision("fp8", CPU) == torch.float8_e4m3fn


def test_a_missing_directory_is_refused(tmp_path):
    with pytest.raises(Rejected):
        tiny.engine(tmp_path / "nowhere")


class Sideways(Toy):
    """Matrices of 16 columns that the artifact holds as 16 rows: one, two in one, and some rows of one."""

    def __init__(self, *given):
        super().__init__(*given)
        sizes = {"one": 32, "two": 48, "some": 3}
        for name, rows in sizes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.empty(rows, 16, dtype=self.dtype, device="meta")))

    def bindings(self):
        return {
            **super().bindings(),
            "one": Binding(("one",), transpose=True),
            "two": Binding(("left", "right"), transpose=True),
            "some": Binding(("wide",), torch.tensor([5, -1, 0]), transpose=True),
        }

    def weight_specs(self):
        own = {"one": (16, 32), "left": (16, 16), "right": (16, 32), "wide": (16, 7)}
        return (*toys(self), *(WeightSpec(name, shape) for name, shape in own.items()))

    def projections(self):
        return ("one", "two")


def toys(module):
    return tuple(WeightSpec(name, tuple(x.shape)) for name, x in module.named_parameters() if name[-1].isdigit())


def sideways(directory, change=lambda tensors: None, precision="float32"):
    generator = torch.Generator().manual_seed(0)
    shapes = {"one": (16, 32), "left": (16, 16), "right": (16, 32), "wide": (16, 7)}
    shapes |= {f"{kind}.{t}": (4, 16) for kind in ("codes", "heads") for t in range(2)}
    stored = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    change(stored)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text('{"width": 16}')
    save_file(stored, directory / "model.safetensors")
    sid, limits = SidConfig(sizes=(4, 4)), Limits(widths=(4, 4), rows=16, batch=4, context=8)
    return stored, load(directory, Sideways, sid, limits, precision=precision, device=CPU)


@pytest.mark.parametrize("chunk", [1, 300, safetensors.CHUNK])
def test_a_matrix_that_is_stored_the_other_way_round_is_turned_piece_by_piece(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors, "CHUNK", chunk)
    stored, engine = sideways(tmp_path)
    bound = parameters(engine)
    assert torch.equal(bound["one"], stored["one"].t())
    assert torch.equal(bound["two"], torch.cat([stored["left"].t(), stored["right"].t()]))
    assert torch.equal(bound["some"], torch.stack([stored["wide"][:, 5], torch.zeros(16), stored["wide"][:, 0]]))
    _, half = sideways(tmp_path, precision="bfloat16")  # cast before, while or after they are turned and picked
    assert all(torch.equal(one, bound[name].bfloat16()) for name, one in parameters(half).items())
    _, eight = sideways(tmp_path, precision="fp8")
    bound = parameters(eight)
    for name in ("one", "two"):  # scales are of the rows that it has here, not of those on the disk
        data, scale = quantise_rows(torch.cat([stored[x].t() for x in {"two": ("left", "right")}.get(name, (name,))]))
        assert torch.equal(bound[f"{name}.data"].view(torch.uint8), data.view(torch.uint8))
        assert torch.equal(bound[f"{name}.scale"], scale)


def test_what_is_stored_the_other_way_round_is_checked_as_it_is_stored(tmp_path):
    with pytest.raises(Rejected) as caught:
        sideways(tmp_path, lambda tensors: tensors.update(one=tensors["one"].t().contiguous()))
    assert (caught.value.code, caught.value.location) == ("bad_shape", "model.safetensors: one")
    with pytest.raises(Rejected) as caught:
        sideways(tmp_path, lambda tensors: tensors["right"].view(-1).__setitem__(3, torch.inf))
    assert (caught.value.code, caught.value.location) == ("not_finite", "model.safetensors: right")


def test_a_contract_says_what_is_transposed_split_and_gathered(tmp_path):
    _, engine = sideways(tmp_path)
    facts = {one["parameter"]: one for one in weight_facts(engine._family, torch.float32)}
    cast = {"op": "cast", "dtype": "float32"}
    assert facts["one"]["sources"] == [{"name": "one", "shape": (16, 32)}]
    assert (facts["one"]["shape"], facts["one"]["transform"]) == ([32, 16], [{"op": "transpose"}, cast])
    assert facts["two"]["transform"] == [{"op": "transpose"}, cast, {"op": "concatenate", "dim": 0}]
    assert [one["op"] for one in facts["some"]["transform"]] == ["transpose", "gather", "cast"]
    assert facts["codes.0"]["transform"] == [cast]
    plain = Binding(("wide",), torch.arange(2, 5))
    assert _transform(plain, "float32", eight=False) == [{"op": "split", "first": 2, "rows": 3}, cast]


def test_only_a_matrix_can_be_transposed(tmp_path):
    class Vector(Sideways):
        def __init__(self, *given):
            super().__init__(*given)
            self.one = torch.nn.Parameter(torch.empty(32, dtype=self.dtype, device="meta"))

        def weight_specs(self):
            return tuple(
                WeightSpec(one.name, (32,) if one.name == "one" else one.shape) for one in super().weight_specs()
            )

    sideways(tmp_path)
    with pytest.raises(Fault, match="`one` is no matrix"):
        edit(tmp_path, lambda tensors: tensors.update(one=torch.zeros(32)))
        load(tmp_path, Vector, SidConfig(sizes=(4, 4)), Limits(widths=(4, 4), rows=16), device=CPU)


@pytest.mark.parametrize("chunk", [64, 1 << 20])
def test_a_norm_of_every_head_is_read_once_and_lies_head_by_head(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(safetensors, "CHUNK", chunk)
    engine = tiny.engine(tiny.write(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        q, k = (stored[f"model.layers.{layer}.self_attn.{x}_norm.weight"] for x in "qk")
        assert torch.equal(engine.slot.tensors[f"blocks.{layer}.qk_norm"], torch.cat([q] * 4 + [k] * 2))
