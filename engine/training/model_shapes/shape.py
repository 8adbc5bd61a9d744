"""Sizes of a text decoder, and the numbers of parameters that follow from them.

A block is attention with rotary positions, or a recurrent layer (gated delta rule), and a gated MLP, or experts of which a router chooses a
few for each token. Families differ in biases, norms, tied embeddings, and in which blocks have experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.training.model_shapes.attention_kernels import AttentionNeeds


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP of blocks without experts."""
    vocab: int
    tied_embeddings: bool
    """Whether the output layer shares the embedding's weights."""
    context_length: int
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Norms of queries and keys, head by head."""
    wide_qk_norm: bool = False
    """Norms of queries and keys over all heads together."""
    norms_per_layer: int = 2
    fused_projections: bool = False
    """One matrix for queries, keys and values, and one for both halves of the MLP: an adapter has one pair for each."""
    gated_attention: bool = False
    """Queries come with a gate of their size."""
    num_recurrent_layers: int = 0
    """Layers with a state (gated delta rule) instead of attention."""
    recurrent_key: int = 0
    recurrent_value: int = 0
    recurrent_heads: int = 0
    recurrent_kernel: int = 0
    """Tokens that the convolution before the state reads."""
    num_moe_layers: int = 0
    """Layers with experts."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    """Width of the expert that reads every token; 0 if there is none."""
    shared_gate: bool = False
    """Whether the shared expert is weighed by a gate of its own."""
    expert_bias: bool = False
    sinks: bool = False
    """One more parameter per head: attention that goes to no token."""
    soft_caps: bool = False
    """Attention scores are capped before the softmax."""
    chunked_attention: bool = False
    """Layers whose tokens see only those of their chunk of a window."""
    attention_dropout: bool = False
    varying_rope: str = ""
    """Scaling of rotary positions that depends on the longest example of a batch."""
    max_packed_len: int | None = None
    """Longest window in which examples may share; 0: none, because a state passes from one to the next; None: any length."""
    other_parameters: int = 0
    """Frozen parameters outside the text decoder, such as those of an image encoder."""
    assumed: bool = False
    """The model's own shape is unknown; this is a similar one of at least its size."""

    @property
    def attention_needs(self) -> AttentionNeeds:
        return AttentionNeeds(
            head_dim=self.head_dim,
            extra="soft caps" if self.soft_caps else "sinks" if self.sinks else "",
            layers="recurrent" if self.num_recurrent_layers else "chunked" if self.chunked_attention else "",
            dropout=self.attention_dropout,
        )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_attention_layers(self) -> int:
        return self.num_layers - self.num_recurrent_layers

    @property
    def mlp_width(self) -> int:
        """Widest MLP that a token goes through: the chosen experts and the shared one together count as one."""
        chosen = self.experts_per_token * self.expert_intermediate + self.shared_intermediate
        return max(chosen, self.intermediate if self.num_layers > self.num_moe_layers else 0)

    @property
    def attention_linears(self) -> tuple[tuple[int, int], ...]:
        """Returns (inputs, outputs) of the projections of attention."""
        h, q, kv = self.hidden, self.q_size * (2 if self.gated_attention else 1), self.kv_size
        return ((h, q + 2 * kv), (self.q_size, h)) if self.fused_projections else ((h, q), (h, kv), (h, kv), (self.q_size, h))

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Returns (inputs, outputs) of the linear layers of a block that an adapter trains: of attention, and of a dense MLP or a shared
        expert."""
        width = self.intermediate if self.num_layers > self.num_moe_layers else self.shared_intermediate
        return (*self.attention_linears, *self._mlp(width))

    @property
    def adapter_modules(self) -> tuple[str, ...]:
        """Returns the last parts of the names of the layers in ``linears``."""
        attention = ("qkv_proj", "o_proj") if self.fused_projections else ("q_proj", "k_proj", "v_proj", "o_proj")
        mlp = ("gate_up_proj", "down_proj") if self.fused_projections else ("gate_proj", "up_proj", "down_proj")
        return (*attention, *mlp) if len(self.linears) > len(self.attention_linears) else attention

    def _mlp(self, width: int) -> tuple[tuple[int, int], ...]:
        h = self.hidden
        if not width:
            return ()
        return ((h, 2 * width), (width, h)) if self.fused_projections else ((h, width), (h, width), (width, h))

    @property
    def linear_parameters(self) -> int:
        """Weights of the linear layers of all blocks, which QLoRA quantizes. Experts are stacked matrices and not among them."""
        recurrent = self.hidden * (2 * self.recurrent_key + 3 * self.recurrent_value + 2 * self.recurrent_heads)
        return (
            self.num_attention_layers * _weights(self.attention_linears)
            + (self.num_layers - self.num_moe_layers) * _weights(self._mlp(self.intermediate))
            + self.num_moe_layers * _weights(self._mlp(self.shared_intermediate))
            + self.num_recurrent_layers * recurrent
        )

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        bias = 2 * self.expert_intermediate + self.hidden if self.expert_bias else 0
        return self.num_moe_layers * self.num_experts * (3 * self.hidden * self.expert_intermediate + bias)

    @property
    def active_expert_parameters(self) -> int:
        """Parameters of the experts that one token goes through."""
        return self.expert_parameters * self.experts_per_token // self.num_experts if self.num_experts else 0

    @property
    def router_parameters(self) -> int:
        return self.num_moe_layers * (self.num_experts * (self.hidden + self.expert_bias) + self.hidden * self.shared_gate)

    @property
    def active_parameters(self) -> int:
        """Weights of the blocks that one token is multiplied with."""
        return self.linear_parameters + self.active_expert_parameters

    @property
    def embedding_parameters(self) -> int:
        """Embedding and, unless tied, output layer."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def small_parameters(self) -> int:
        """Norms, biases, sinks, routers and convolutions, neither adapted nor quantized."""
        attention = (self.q_size + 2 * self.kv_size) * self.qkv_bias + self.hidden * self.o_bias + self.num_heads * self.sinks
        attention += 2 * self.head_dim * self.qk_norm + (self.q_size + self.kv_size) * self.wide_qk_norm
        mlp = (2 * self.intermediate + self.hidden) * self.mlp_bias
        state = (2 * self.recurrent_key + self.recurrent_value) * self.recurrent_kernel + 2 * self.recurrent_heads
        state += self.recurrent_value // self.recurrent_heads if self.recurrent_heads else 0
        return (
            self.num_layers * self.norms_per_layer * self.hidden
            + self.num_attention_layers * attention
            + (self.num_layers - self.num_moe_layers) * mlp
            + self.num_recurrent_layers * state
            + self.router_parameters
            + self.hidden
        )

    @property
    def decoder_parameters(self) -> int:
        """Parameters of the text decoder and its head."""
        return self.linear_parameters + self.expert_parameters + self.embedding_parameters + self.small_parameters

    @property
    def num_parameters(self) -> int:
        return self.decoder_parameters + self.other_parameters

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest block: what sharded training gathers at a time."""
        each = (self.linear_parameters + self.small_parameters - self.hidden) // self.num_layers
        return each + (self.expert_parameters // self.num_moe_layers if self.num_moe_layers else 0)

    def lora_parameters(self, rank: int) -> int:
        """Parameters of an adapter on every linear layer of the blocks but those of recurrent layers, routers and experts."""
        return rank * (
            self.num_attention_layers * _sides(self.attention_linears)
            + (self.num_layers - self.num_moe_layers) * _sides(self._mlp(self.intermediate))
            + self.num_moe_layers * _sides(self._mlp(self.shared_intermediate))
        )


def _weights(linears: tuple[tuple[int, int], ...]) -> int:
    return sum(i * o for i, o in linears)


def _sides(linears: tuple[tuple[int, int], ...]) -> int:
    return sum(i + o for i, o in linears)
