"""The paged KV cache: the accounting of blocks, and the moves of accepted tree paths between them."""
