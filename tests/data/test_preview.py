"""What is shown of a batch is what is trained."""

from __future__ import annotations

import numpy as np

from glm5.data.packing import make_row
from glm5.data.preview import show_row, summary_rows, view_row
from glm5.tokenizer import Tokenizer


def test_documents_text_and_masks_of_a_row(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("abc"), tokenizer.encode("one two")
    ids = np.array([*first, tokenizer.pad_id, *second])
    documents = np.array([0] * (len(first) + 1) + [1] * len(second))
    trained = np.ones(len(ids), dtype=bool)
    trained[1] = False
    row = make_row(ids, documents, len(ids) + 3, tokenizer.pad_id, trained)
    views = view_row(row, tokenizer)
    assert [(view.document, view.start, view.tokens) for view in views] == [
        (0, 0, len(first) + 1), (1, len(first) + 1, len(second))]
    assert "".join(span.text for span in views[0].spans) == "abc<|endoftext|>"
    assert not views[0].spans[0].trained and views[0].spans[0].tokens == 2
    assert not views[1].spans[0].trained and views[1].spans[0].tokens == 1  # the first token of a document
    assert sum(view.trained for view in views) == int(row.loss_mask.sum())
    lines = list(show_row(row, views, "step 0 row 0"))
    assert lines[0] == (f"── step 0 row 0: {len(ids) + 3} tokens, 2 documents, 3 padding, "
                        f"{int(row.loss_mask.sum())} trained")
    assert lines[-1].startswith("⟦") and lines[-1].replace("⟦", "").replace("⟧", "") == "one two"
    values = {item["name"]: item["value"] for item in summary_rows([row])}
    assert values["data.documents_per_row"] == 2
    assert values["data.padding"] == 1 - len(ids) / (len(ids) + 3)
