"""Fine-tuning jobs: submission, states, results, reuse."""
