"""The symbols of all shape annotations, once.

====== ============================================================
symbol meaning
====== ============================================================
B      rows of a batch
T      tokens of a row (padded to the longest of the batch)
N      anchors (blocks) of a row
K      slots of a block (``block_size``)
S      counted slots of a batch: those with a supervised label
C      context tokens that a block may see
M      tapped target layers
D      hidden size, the target's and the draft's
R      rank of the sequential head
V      vocabulary
H, G   query heads, key/value heads
E      size of one head
====== ============================================================

Slot ``k`` is 0-based; slot ``k`` of the block at anchor position ``p`` predicts token
``p + 1 + k``.
"""
