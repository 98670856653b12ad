import torch

from layerskip_models.training.own_text import closes_loop, own_text
from layerskip_models.training.recipe import IGNORED, early_exit_backward, exit_hidden_states
from tiny_llama import tiny_llama


def test_third_occurrence_of_four_tokens_closes_a_loop():
    #        1  2  3  4 | 1  2  3  4 | 1  2  3  4: the 4-gram 1 2 3 4 ends at 3, 7 and 11
    assert closes_loop([1, 2, 3, 4] * 3) == [False] * 11 + [True]
    # 7 7 7 7 ends at 3, 4, 5, ...; twice is allowed
    assert closes_loop([7] * 7) == [False] * 5 + [True] * 2
    assert closes_loop([1, 2, 3]) == [False] * 3


def test_continuations_are_greedy_and_labelled():
    model = tiny_llama(seed=1)
    prompts = torch.randint(0, 24, (2, 5), generator=torch.Generator().manual_seed(0))
    text = own_text(model, prompts, 30)
    ids = torch.cat([prompts, text.labels[:, 4:]], dim=1)
    assert torch.equal(ids[:, :-1], text.input_ids)
    assert torch.equal(model(ids[:, :-1]).logits.argmax(-1)[:, 4:], ids[:, 5:])
    assert (text.labels[:, :4] == IGNORED).all()
    marks = torch.tensor([closes_loop(row) for row in ids[:, 5:].tolist()])
    assert torch.equal(text.loops[:, 4:], marks)
    assert torch.equal(text.last_labels, text.labels.masked_fill(~text.loops, IGNORED))


def test_unwanted_tokens_lose_probability():
    model = tiny_llama(dtype=torch.float64, seed=2)
    ids = torch.randint(0, 24, (2, 9), generator=torch.Generator().manual_seed(0))
    labels = ids[:, 1:].clone()
    labels[0, :3] = IGNORED
    unwanted = torch.zeros_like(labels, dtype=torch.bool)
    unwanted[1, 2:6] = True
    states = exit_hidden_states(model, ids[:, :-1], [1, 3])
    losses = early_exit_backward(model, states, labels, {1: 0.3, 3: 0.7}, chunk_rows=5, unwanted=unwanted)
    gradient = model.lm_head.weight.grad.clone()

    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for layer, weight in ((1, 0.3), (3, 0.7)):
        state = exit_hidden_states(model, ids[:, :-1], [layer])[layer]
        p = model.lm_head(model.model.norm(state)).softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        loss = torch.where(unwanted, -torch.log(1 - p), -torch.log(p))[labels != IGNORED].mean()
        torch.testing.assert_close(losses[layer].double(), loss, rtol=1e-4, atol=1e-5)
        total = total + weight * loss
    total.backward()
    torch.testing.assert_close(gradient, model.lm_head.weight.grad, rtol=1e-3, atol=1e-6)
