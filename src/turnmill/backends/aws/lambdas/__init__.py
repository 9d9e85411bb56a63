"""The Lambda functions of a run's stack: an external trainer has nothing else of ours running beside its environment.

    rollout     a v0 rollout request     -> sample record, rollout_request     what the trainer calls
    proxy       the chat and rollout routes over a function URL                 what workers and agents call
    responses   generate_response (SQS)  -> Call records                        what the trainer's generator answers

Each module here has `handler(event, context)`, and `boot` holds what they begin with. Nothing happens at import; what
an instance has opened it keeps for the invocations to come.
"""
