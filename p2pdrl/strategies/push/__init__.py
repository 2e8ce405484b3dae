"""Push without waiting for an answer: stochastic gradient push (push-sum) and GALA."""
