"""The HTTP face: OpenAI, Anthropic and token-native routes over a pool of replicas; sessions, capture, control."""
