"""The trained model for everybody who speaks OpenAI's API: no run, no queues, no records.

HTTP -> app -> requests -> conversations (tokens, as training rendered them) -> loop -> engine -> text -> HTTP
"""
