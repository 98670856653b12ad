"""Attention of captured passes by flash attention that reads the length of the text from the device.

The KV cache is shown to it as pages of 256 positions, which follow one another. Nothing that depends on the length is in the
capture, neither a mask nor how many positions are looked at, so one capture serves every length. PyTorch has the operator
for float16 and bfloat16 on CUDA; `attends_by_pages` says whether it can be used, and `StaticForward` has masks otherwise.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from layerskip_models import LayerSkipModel
from layerskip_models.attention import repeat_rows, unseen
from layerskip_models.fork_safe import fork_safe
from layerskip_models.kv_cache import KVCache

PAGE = 256
"""Positions of a page: the operator takes multiples of it."""
EXPECTED_SCHEMA = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None, "
    "Tensor? block_table=None, int? num_splits=None) -> (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, "
    "Tensor unused, Tensor debug_attn_mask)"
)
"""The schema of the operator that is called here. PyTorch may change it with any release; then masks are used."""
_DTYPES = {"cuda": (torch.float16, torch.bfloat16)}
_LARGEST_HEAD = 256
_TRIAL_PAGES = 4  # enough that the operator divides the keys among blocks of its own
_TRIAL_LENGTHS = ((1, 3), (1, 600), (4, 600))  # rows, and the length of the text with them
_BOUND = 0.05  # of a row's norm: what rounding to bfloat16 explains, several times

_lock = fork_safe(threading.Lock())
_decided: WeakKeyDictionary[LayerSkipModel, bool] = WeakKeyDictionary()


class Pages:
    """Memory of one layer's keys or values, and all of a cache's layers, as the operator takes them.

    keys, values: of each layer, [pages, 256, num_kv_heads, head_dim]: the cache's own memory. table: int32 [1, pages].
    Raises ValueError if the length is not a multiple of 256.
    """

    def __init__(self, keys: Iterable[Tensor], values: Iterable[Tensor]) -> None:
        """keys: of each layer [num_kv_heads, head_dim, positions]; values: [num_kv_heads, positions, head_dim]."""
        self.keys = [_in_pages(layer.mT) for layer in keys]
        self.values = [_in_pages(layer) for layer in values]
        pages, device = self.keys[0].shape[0], self.keys[0].device
        self.length = pages * PAGE
        self.table = torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0)
        self._bounds = torch.arange(2, dtype=torch.int32, device=device)
        self._cum_keys = self._bounds * self.length

    @classmethod
    def of(cls, cache: KVCache) -> Pages:
        return cls(cache.keys.unbind(0), cache.values.unbind(0))

    def bounds(self, rows: int) -> Tensor:
        """Where the text's queries begin and end, int32 [2]: for all layers of a pass."""
        return self._bounds * rows

    def attend(self, layer: int, query: Tensor, bounds: Tensor, used: Tensor, window: int | None) -> Tensor:
        """Rows at the end of a text: row i of n attends to the first used - n + 1 + i positions.

        query: [rows, heads, head_dim]. bounds: of as many rows. used: int32 [1]. window: how many positions a row attends to,
        its own among them. Returns [rows, heads * head_dim].
        """
        rows = query.shape[0]
        # PyTorch chooses the number of splits. With more than one, only the first text of a pass is right (a known fault of
        # the operator), and here there is no other.
        attended, *_ = torch.ops.aten._flash_attention_forward(
            query,
            self.keys[layer],
            self.values[layer],
            bounds,
            self._cum_keys,
            rows,
            self.length,
            0.0,
            True,
            False,
            window_size_left=-1 if window is None else window - 1,
            window_size_right=-1 if window is None else 0,
            seqused_k=used,
            block_table=self.table,
            num_splits=None,
        )
        return attended.flatten(1)


def _in_pages(memory: Tensor) -> Tensor:
    """[num_kv_heads, positions, head_dim] -> [pages, 256, num_kv_heads, head_dim], without a copy."""
    kv_heads, positions, dim = memory.shape
    if positions % PAGE:
        raise ValueError(f"{positions} positions are not whole pages of {PAGE}")
    return memory.view(kv_heads, positions // PAGE, PAGE, dim).permute(1, 2, 0, 3)


class PagedAttention:
    """Attention for consecutive rows, from a position on that only the device knows (`Attention`).

    positions: int64 [rows], each one more than the one before. windows: the sliding window of every layer.
    """

    def __init__(
        self, cache: KVCache, pages: Pages, positions: Tensor, rotary: Tensor, windows: Sequence[int | None]
    ) -> None:
        self._cache, self._pages, self._positions = cache, pages, positions
        self.rotary, self._windows = rotary, windows
        self._bounds = pages.bounds(positions.shape[0])
        self._used = (positions[-1:] + 1).to(torch.int32)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        write_rows(self._cache, layer, self._positions, key, value)
        return self._pages.attend(layer, query, self._bounds, self._used, self._windows[layer])


def write_rows(cache: KVCache, layer: int, positions: Tensor, key: Tensor, value: Tensor) -> None:
    """Keep keys and values, [rows, kv_heads, head_dim], at positions that only the device knows, int64 [rows]."""
    keys, values = cache.keys[layer], cache.values[layer]
    keys.index_copy_(2, positions, rearrange(key, "rows kv dim -> kv dim rows").to(keys.dtype))
    values.index_copy_(1, positions, rearrange(value, "rows kv dim -> kv rows dim").to(values.dtype))


def attends_by_pages(model: LayerSkipModel) -> bool:
    """Whether captured passes of this model use the operator: where PyTorch has it in the form known here, for this device,
    dtype and size of heads, and where a trial on the device gives right numbers. Decided once for a model.

    A trial that fails costs a warning.
    """
    with _lock:
        decided = _decided.get(model)
        if decided is None:
            decided = _decided[model] = _takes(model) and _succeeds(model)
    return decided


def whole_pages(length: int) -> int:
    """Round this many positions up to whole pages."""
    return -(-length // PAGE) * PAGE


def _takes(model: LayerSkipModel) -> bool:
    """Whether the operator takes a model of this dtype and head size."""
    takes_dtype = model.dtype in _DTYPES.get(model.device.type, ()) and model.kv_dtype == model.dtype
    return takes_dtype and model.head_dim % 8 == 0 and model.head_dim <= _LARGEST_HEAD


def _succeeds(model: LayerSkipModel) -> bool:
    if not _has_expected_schema():
        return False
    try:
        failure = _trial(model)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    if failure is not None:
        warnings.warn(f"captured passes use masks instead of flash attention: {failure}", RuntimeWarning, stacklevel=2)
    return failure is None


def _has_expected_schema() -> bool:
    packet = getattr(torch.ops.aten, "_flash_attention_forward", None)
    return packet is not None and str(packet.default._schema) == EXPECTED_SCHEMA


def _trial(model: LayerSkipModel) -> str | None:
    """Run the operator on random numbers as this model's passes will; what is wrong with its results, None if nothing is."""
    device, dtype, heads, kv_heads, dim = model.device, model.dtype, model.num_heads, model.num_kv_heads, model.head_dim
    generator = torch.Generator(device).manual_seed(0)  # nobody else's random numbers

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    with torch.inference_mode():
        keys, values = drawn(kv_heads, _TRIAL_PAGES * PAGE, dim).mT, drawn(kv_heads, _TRIAL_PAGES * PAGE, dim)
        pages = Pages([keys], [values])
        for rows, length in _TRIAL_LENGTHS:
            query = drawn(rows, heads, dim)
            used = torch.full((1,), length, dtype=torch.int32, device=device)
            for window in set(model.sliding_windows):
                found = pages.attend(0, query, pages.bounds(rows), used, window).float()
                expected = _expected(query.float(), keys.float(), values.float(), length, window)
                gap = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
                if not bool((gap <= _BOUND).all()):
                    return f"{rows} rows of {length} positions differ by {float(gap.max()):.2g} of their size"
    return None


def _expected(query: Tensor, keys: Tensor, values: Tensor, length: int, window: int | None) -> Tensor:
    """Compute the same with a mask, in float32."""
    rows, kv_heads = query.shape[0], keys.shape[0]
    places = torch.arange(length, device=query.device)
    hidden = unseen(places[length - rows :], places, window)
    mask = torch.zeros(hidden.shape, device=query.device).masked_fill_(hidden, -torch.inf)
    grouped = rearrange(query, "rows (kv group) dim -> 1 kv (rows group) dim", kv=kv_heads)
    mask = repeat_rows(mask, query.shape[1] // kv_heads)
    seen = keys[..., :length].mT.unsqueeze(0), values[:, :length].unsqueeze(0)
    attended = F.scaled_dot_product_attention(grouped, *seen, attn_mask=mask)
    return rearrange(attended, "1 kv (rows group) dim -> rows (kv group dim)", rows=rows)
