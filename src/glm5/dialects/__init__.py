"""The dialects of the API, shared by the server and the gateway: bodies in, answers and events out. Free of torch."""
