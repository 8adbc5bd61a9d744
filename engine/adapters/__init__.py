"""Adapters: the record of a job's result, its package, promotion and rollout, exports, signatures; see README.md."""

from typing import TYPE_CHECKING

from core.doors import lazily

if TYPE_CHECKING:
    from engine.adapters.cluster import (
        IMAGE_DIGEST,
        SERVER_USER,
        ClusterObject,
        ClusterSettings,
        kubernetes_name,
        label_selector,
        label_value,
        objects_yaml,
        pod_container,
    )
    from engine.adapters.exports import ExportFormat, ExportPrecision, checked_export, export_key
    from engine.adapters.exports.archive import BuiltExport, ExportOrder, build_export, unpack_export
    from engine.adapters.llm_d import POOL_COMPONENT, POOL_GROUP, AdapterPool, pool_environment, pool_urls, render_pool, render_route
    from engine.adapters.package import (
        ADAPTER_CONFIG,
        ADAPTER_WEIGHTS,
        PACKAGE_MANIFEST,
        TOKENIZER_FILES,
        check_package_files,
        listed_files,
        manifest_files,
        read_package,
        verify_package,
        write_package,
    )
    from engine.adapters.promotion_rules import (
        PromotionCandidate,
        Releasability,
        base_mismatch,
        promotion_refusals,
        releasability,
        release_refusals,
        release_step,
    )
    from engine.adapters.record import (
        FULL_MODEL,
        LORA_ADAPTER,
        AdapterName,
        AdapterRecord,
        check_complete,
        make_adapter_name,
        parse_adapter_name,
    )
    from engine.adapters.rollout_plan import (
        LOAD_FAILED,
        LOADED,
        NOT_ACCEPTED,
        UNLOADED,
        WITHDRAWN,
        DesiredAdapter,
        RolloutAction,
        SeenOnServer,
        plan_rollout,
        pool_state,
        rollout_wait_s,
    )
    from engine.adapters.servability import DORA_DETAIL, TENSOR, Refusal, scale_of
    from engine.adapters.servers import SERVER_COMPONENT, fetch_arguments, render_server, server_object_name, server_url
    from engine.adapters.serving_index import INDEX_PATTERN, IndexEntry, index_filename, write_index
    from engine.adapters.signatures.dsse import Envelope, open_envelope, sign_statement
    from engine.adapters.signatures.public_keys import decode_key, encode_key, key_id, key_set, read_key_set
    from engine.adapters.signatures.signed_folder import ENVELOPE_FILE, check_signed_folder
    from engine.adapters.signatures.statements import EXPORTED_BUILD, TRAINED_BUILD, provenance, statement_subjects
    from engine.adapters.stages import DEPRECATION_GRACE, STAGE_TRANSITIONS, Stage, check_transition
    from engine.adapters.tensors import FLOAT_TYPES, ITEM_BYTES, TensorInfo, module_shapes, tensor_header, weight_shapes
    from engine.adapters.whole_model import MODEL_CONFIG, OWN_SERVER, is_whole_model, verify_whole_model, write_whole_model

__getattr__, __dir__ = lazily(__name__)
