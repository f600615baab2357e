"""A model of a few thousand parameters and packed rows for it."""

import pytest
import torch

from glm5.data.packing import Batch
from glm5.model.config import preset
from glm5.model.transformer import GlmMoeDsaForCausalLM

VOCABULARY = 320


def tiny_config():
    return preset("nano").replace(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=12, qk_nope_head_dim=6,
        qk_rope_head_dim=4, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, first_k_dense_replace=1,
        index_n_heads=16, index_head_dim=8, index_topk=8, max_position_embeddings=64,
        initializer_range=0.2)  # wide enough that attention is far from uniform


def tiny_model(seed=0):
    return GlmMoeDsaForCausalLM(tiny_config(), generator=torch.Generator().manual_seed(seed))


def packed_batch(rows=4, length=24, seed=0):
    """Rows of three documents (of different lengths) and two tokens of padding."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    documents_BT, positions_BT = torch.full((rows, length), -1), torch.zeros(rows, length, dtype=torch.int64)
    for row in range(rows):
        start = 0
        for document, end in enumerate((5 + row, 13, length - 2)):
            documents_BT[row, start:end] = document
            positions_BT[row, start:end] = torch.arange(end - start)
            start = end
    loss_mask_BT = torch.zeros(rows, length, dtype=torch.bool)
    loss_mask_BT[:, :-1] = (documents_BT[:, :-1] == documents_BT[:, 1:]) & (documents_BT[:, 1:] >= 0)
    return Batch(ids_BT=ids_BT, positions_BT=positions_BT, documents_BT=documents_BT, loss_mask_BT=loss_mask_BT)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
