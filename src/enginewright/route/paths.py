"""Paths of the API that a proxy passes on."""

# Paths that any replica can answer. All others are refused: a replica may have paths that are not for clients.
POSTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/chat/completions/render", "/v1/completions/render", "/v1/embeddings", "/tokenize", "/detokenize"),
    *("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"),
)
GETS = ("/v1/models/{name:path}", "/version", "/openapi.json")
KEPT = "/v1/responses/{id}"  # a response that one replica keeps
MAX_ID_CHARS = 200  # length of the id of a response
