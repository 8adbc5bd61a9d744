"""``/v1/responses``, translated to chat completions and back, so that every inference server answers it.

    asked = read_request(body)          # requests.py: the body's fields; items.py: its `input` as messages
    answer = forward(asked.chat)        # a chat completion, whole or streamed
    asked.response(answer)              # answers.py: the object; events.py: the events of a stream

Nothing is stored: a request carries its whole conversation, and its answer cannot be retrieved.
"""
