"""The step loop, losses and optimizers; the stages from pre-training to fine-tuning."""
