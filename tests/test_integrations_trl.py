"""TRL's trainers with detlogp: a GRPO run made twice, the functions' values, and the way back."""

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import detlogp
from detlogp.evidence.kernels import Recorder
from detlogp.integrations import trl as integration
from detlogp.testing import assert_same_bits

# Of TRL, about transformers' names.
pytestmark = pytest.mark.filterwarnings("ignore:.* will be removed in v6:FutureWarning")
MODEL_DIR = Path(__file__).parents[1] / "examples" / "tiny-llama"
PROMPTS = ["Return the", "This method is called when", "Wrap a paragraph of", "If the argument is"]
TIMINGS = ("_runtime", "_per_second", "step_time")
STEPS = 4
V = 300
NAMES = (
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
    "entropy_from_logits",
    "_ChunkedLogProbFunction",
)


@pytest.fixture(scope="module")
def utils() -> ModuleType:
    return importlib.import_module("trl.trainer.utils")


@pytest.fixture
def enabled(utils: ModuleType) -> Iterator[None]:
    with integration.enable():
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A model of this size is slower with more, and much slower where other work runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prose(completions: list[str], **_: Any) -> list[float]:
    """The share of lowercase letters and spaces."""
    return [sum(c.islower() or c == " " for c in text) / max(1, len(text)) for text in completions]


def train(folder: Path) -> list[dict[str, Any]]:
    """A GRPO run with a reference model and two updates a rollout; what it logged, less timings."""
    trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)
    tokenizer.pad_token = tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, dtype=torch.float32, local_files_only=True
    )
    settings = trl.GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=STEPS,
        num_iterations=2,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=12,
        learning_rate=1e-4,
        beta=0.04,
        temperature=0.9,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=prose,
        args=settings,
        train_dataset=datasets.Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=tokenizer,
    )
    trainer.train()
    history: list[dict[str, Any]] = trainer.state.log_history
    return [
        {name: value for name, value in entry.items() if not name.endswith(TIMINGS)}
        for entry in history
    ]


def bits(history: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{name: float(v).hex() for name, v in entry.items()} for entry in history]


def test_a_grpo_run_twice(enabled: None, one_thread: None, tmp_path: Path) -> None:
    with Recorder() as recorder:
        first = train(tmp_path / "first")
    assert set(recorder.names()) == {"logp_with_entropy", "logp_backward"}
    second = train(tmp_path / "second")
    assert bits(first) == bits(second)
    assert len(first) == STEPS + 1
    losses = [entry["loss"] for entry in first[:STEPS]]
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == STEPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_layouts_give_a_ratio_of_one(
    enabled: None, utils: ModuleType, dtype: torch.dtype, generator: torch.Generator
) -> None:
    logits = (3 * torch.randn(6, 5, V, generator=generator)).to(dtype)
    ids = torch.randint(V, (6, 5), generator=generator)
    whole = utils.selective_log_softmax(logits, ids, temperature=0.7)
    alone = [
        utils.selective_log_softmax(*row, temperature=0.7)
        for row in zip(logits.split(1), ids.split(1), strict=True)
    ]
    strided = logits.transpose(0, 1).contiguous().transpose(0, 1)
    for other in (torch.cat(alone), utils.selective_log_softmax(strided, ids, temperature=0.7)):
        assert_same_bits(other, whole)
        assert ((other - whole).exp() == 1).all()


def selective_cases() -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    mask = torch.arange(12).view(3, 4) % 3
    yield (3, 4), {}
    yield (3, 4), {"temperature": 0.5}
    yield (3, 4), {"row_mask": mask}
    yield (3, 4, 2), {"temperature": 2.0}
    yield (3, 4, 2), {"row_mask": torch.stack([mask, mask.flip(0)], -1)}


@pytest.mark.parametrize(("shape", "options"), list(selective_cases()))
def test_selective_log_softmax_is_trls(
    utils: ModuleType,
    shape: tuple[int, ...],
    options: dict[str, Any],
    generator: torch.Generator,
) -> None:
    """In float64, where TRL's own formula is a reference: values and gradients."""
    leaf = torch.randn(3, 4, V, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.randint(V, shape, generator=generator)
    expected = utils.selective_log_softmax(leaf, ids, **options)
    cotangent = torch.randn(shape, dtype=torch.float64, generator=generator)
    (gradient,) = torch.autograd.grad(expected, leaf, cotangent)
    with integration.enable(), Recorder() as recorder:
        got = utils.selective_log_softmax(leaf, ids, **options)
    has_temperature = "temperature" in options
    operator = "logp_with_entropy" if has_temperature else "logp_with_stats"
    several = {"targets"} if len(shape) == 3 else set()
    assert set(recorder.names()) == {operator} | several
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(got, leaf, cotangent)[0], gradient)


@pytest.mark.parametrize("entropy_requires_grad", [True, False])
def test_values_and_entropies(
    utils: ModuleType, entropy_requires_grad: bool, generator: torch.Generator
) -> None:
    """detlogp's bits, and in float64 what TRL's own formula gives, with its gradient."""
    leaf = torch.randn(3, 4, V, dtype=torch.float64, generator=generator).requires_grad_()
    ids = torch.randint(V, (3, 4), generator=generator)
    mask = torch.arange(12).view(3, 4) % 2
    options: dict[str, Any] = {"temperature": 0.5, "row_mask": mask}
    options["entropy_requires_grad"] = entropy_requires_grad
    function = "selective_log_softmax_and_entropy"
    before = getattr(utils, function)(leaf, ids, **options)
    with integration.enable(), Recorder() as recorder:
        after = getattr(utils, function)(leaf, ids, **options)
        alone = utils.entropy_from_logits(leaf)
    assert set(recorder.names()) == {"logp_with_entropy"}
    half = detlogp.logp(leaf, ids, rows=mask != 0, temperature=0.5, return_entropy=True)
    gradients = []
    for found in (before, after):
        total = found[0].sum() + (found[1] * torch.arange(4)).sum()
        gradients.append(torch.autograd.grad(total, leaf)[0])
    torch.testing.assert_close(gradients[1], gradients[0])
    for got, want, bits in zip(after, before, half, strict=True):
        torch.testing.assert_close(got, want)
        assert_same_bits(got.detach(), bits.detach())
    torch.testing.assert_close(alone, utils.entropy_from_logits(leaf))
    assert after[1].requires_grad == entropy_requires_grad


def head_by_hand(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = logits * options["logit_scale"]
    if (cap := options["final_logit_softcapping"]) is not None:
        logits = cap * torch.tanh(logits / cap)
    logp = torch.log_softmax(logits / options["temperature"], -1)
    return logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("scale", "cap", "temperature"), [(1.0, None, 1.0), (0.5, 3.0, 0.7)])
@pytest.mark.parametrize("tile_rows", [4, 100])
def test_the_fused_head(
    utils: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    generator: torch.Generator,
    has_bias: bool,
    scale: float,
    cap: float | None,
    temperature: float,
    tile_rows: int,
) -> None:
    monkeypatch.setattr(integration, "TILE_ROWS", tile_rows)
    shapes = [(10, 16), (V, 16), *([(V,)] if has_bias else [])]
    leaves = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    hidden, weight = leaves[:2]
    bias = leaves[2] if has_bias else None
    ids = torch.randint(V, (10,), generator=generator)
    options = {"temperature": temperature, "final_logit_softcapping": cap, "logit_scale": scale}
    arguments = (hidden, weight, bias, ids, temperature, 128, cap, scale, ("log_probs", "entropy"))
    theirs = utils._ChunkedLogProbFunction.apply(*arguments)
    with integration.enable():
        ours = utils._ChunkedLogProbFunction.apply(*arguments)
    expected = head_by_hand(hidden, weight, bias, ids, options)
    assert ours[2:] == (None, None, None)
    cotangent = torch.randn(10, dtype=torch.float64, generator=generator)
    for found, also, by_hand in zip(ours[:2], theirs[:2], expected, strict=True):
        torch.testing.assert_close(found, by_hand)
        torch.testing.assert_close(also.double(), by_hand, rtol=1e-3, atol=1e-3)  # in float32
        for got, want in zip(
            torch.autograd.grad(found, leaves, cotangent, retain_graph=True),
            torch.autograd.grad(by_hand, leaves, cotangent, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("trainer", ["dpo", "grpo", "kto", "rloo", "sft"])
def test_trainers_that_have_the_fused_head(utils: ModuleType, trainer: str) -> None:
    module = importlib.import_module(f"trl.trainer.{trainer}_trainer")
    assert module.add_fused_lm_head is utils.add_fused_lm_head
    others = {"selective_log_softmax", "selective_log_softmax_and_entropy", "log_softmax"}
    assert not others & set(vars(module))


def test_the_heads_logits_exist_a_tile_at_a_time(
    enabled: None, utils: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten rows in tiles of four, which the backward computes again."""
    monkeypatch.setattr(integration, "TILE_ROWS", 4)
    hidden, weight = torch.randn(10, 16), torch.randn(V, 16, requires_grad=True)
    ids = torch.randint(V, (10,))
    with Recorder() as forward:
        values = utils._ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, 128)
    with Recorder() as backward:
        values[0].sum().backward()
    tiles = [("logp_with_entropy", rows) for rows in (4, 4, 2)]
    assert [(name, len(arguments[0])) for name, arguments in forward.calls] == tiles
    recomputed = [call for call in backward.calls if call[0] == "logp_with_entropy"]
    assert sorted(len(arguments[0]) for _, arguments in recomputed) == [2, 4, 4]
    assert backward.names().count("logp_backward") == 3


def test_a_head_in_another_dtype(
    enabled: None, utils: ModuleType, generator: torch.Generator
) -> None:
    """As `cast_lm_head_to_fp32` has it: float32 logits of a bfloat16 head."""
    hidden = torch.randn(10, 16, generator=generator)
    weight = torch.randn(V, 16, generator=generator).bfloat16()
    bias = torch.randn(V, generator=generator).bfloat16()
    ids = torch.randint(V, (10,), generator=generator)
    value = utils._ChunkedLogProbFunction.apply(hidden, weight, bias, ids, 1.0, 128)[0]
    logits = torch.nn.functional.linear(hidden, weight.float(), bias.float())
    assert_same_bits(value, detlogp.logp(logits, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_dtype_under_autocast(
    enabled: None, utils: ModuleType, dtype: torch.dtype, generator: torch.Generator
) -> None:
    """bfloat16 logits, whatever the weights, and scored as they are; gradients as ever."""
    hidden = torch.randn(10, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, 16, generator=generator).to(dtype).requires_grad_()
    ids = torch.randint(V, (10,), generator=generator)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = utils._ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, 128, None, 1.0)
    logits = torch.nn.functional.linear(hidden.bfloat16(), weight.bfloat16())
    expected = detlogp.logp(logits, ids)
    assert_same_bits(values[0].detach(), expected.detach())
    for got, want in zip(
        torch.autograd.grad(values[0].sum(), (hidden, weight)),
        torch.autograd.grad(expected.sum(), (hidden, weight)),
        strict=True,
    ):
        assert_same_bits(got, want)


def test_a_partitioned_head_raises(enabled: None, utils: ModuleType) -> None:
    weight = torch.randn(V, 16)
    vars(weight)["ds_id"] = 0
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="ZeRO-3"):
        utils._ChunkedLogProbFunction.apply(torch.randn(2, 16), weight, None, ids, 1.0, 128)


def test_a_head_without_rows(enabled: None, utils: ModuleType) -> None:
    """A micro-batch without labels: an empty result that is still connected."""
    hidden = torch.randn(0, 16, requires_grad=True)
    weight = torch.randn(V, 16, requires_grad=True)
    ids = torch.empty(0, dtype=torch.int64)
    values = utils._ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, 128)
    assert [value.shape for value in values] == [(0,)] * 5
    assert torch.autograd.grad(values[0].sum(), weight)[0].count_nonzero() == 0


def test_a_bad_id_is_not_a_quiet_zero(enabled: None, utils: ModuleType) -> None:
    logits = torch.zeros(1, 3, V)
    values = utils.selective_log_softmax(logits, torch.tensor([[0, V, -100]]))
    assert values.isnan().tolist() == [[False, True, True]]
    with pytest.raises(ValueError, match=r"temperature must be positive, got 0\.0"):
        utils.selective_log_softmax(logits, torch.zeros(1, 3, dtype=torch.int64), temperature=0.0)


def held() -> dict[tuple[str, str], int]:
    """What each module of TRL holds under the names that are exchanged."""
    found: dict[tuple[str, str], int] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trl":
            values = vars(module)
            found |= {(name, known): id(values[known]) for known in NAMES if known in values}
    return found


def test_undone(utils: ModuleType) -> None:
    before = held()
    assert len(before) >= len(NAMES)
    outer = integration.enable()
    inner = integration.enable()
    during = held()
    assert all(during[place] != before[place] for place in before)
    outer.undo()
    outer.undo()
    assert held() == during
    inner.undo()
    assert held() == before
    with pytest.raises(KeyError), integration.enable(), integration.enable():
        raise KeyError
    assert held() == before


def test_undone_in_a_module_that_came_later(
    utils: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = ModuleType("trl.later")
    monkeypatch.setitem(sys.modules, "trl.later", later)
    with integration.enable():
        vars(later)["score"] = utils.selective_log_softmax
        assert vars(later)["score"] is integration.selective_log_softmax
    assert vars(later)["score"] is utils.selective_log_softmax
    assert vars(later)["score"] is not integration.selective_log_softmax


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", ["missing", "other parameters"])
def test_unknown_internals(
    utils: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> None:
    if change == "missing":
        monkeypatch.delattr(utils, name)
    elif name == "_ChunkedLogProbFunction":
        monkeypatch.setattr(getattr(utils, name), "forward", lambda ctx, hidden: hidden)
    else:
        monkeypatch.setattr(utils, name, lambda logits: logits)
    before = held()
    with pytest.raises(RuntimeError, match=f"trl 1.*{name}.*has changed nothing"):
        integration.enable()
    assert held() == before


def test_a_trainer_that_takes_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    grpo = importlib.import_module("trl.trainer.grpo_trainer")
    monkeypatch.setattr(grpo, "add_fused_lm_head", lambda model: model)
    with pytest.raises(RuntimeError, match="GRPOTrainer was expected to score"):
        integration.enable()
