{{- /* The project's dagster.yaml with runs in pods. */}}
{{- define "ft.dagsterYaml" -}}
{{- $dagster := .Files.Get "files/dagster.yaml" | fromYaml }}
{{- $_ := set $dagster "run_launcher" (dict "module" "dagster_k8s" "class" "K8sRunLauncher" "config" (include "ft.runLauncher" . | fromYaml)) }}
{{- toYaml $dagster }}
{{- end }}

{{- /* Steps get the same pods, changed by the configuration of their run (sensors/run_requests.py). */}}
{{- define "ft.runLauncher" -}}
job_namespace: {{ .Release.Namespace }}
job_image: {{ include "ft.image" .Values.images.trainer }}
image_pull_policy: IfNotPresent
{{- with .Values.images.pullSecrets }}
image_pull_secrets: {{- range . }}
  - {name: {{ . }}}
{{- end }}
{{- end }}
service_account_name: {{ include "ft.name" . }}-runs
instance_config_map: {{ include "ft.name" . }}-files
dagster_home: /var/lib/dagster
labels: {{- include "ft.selector" . | nindent 2 }}
  app.kubernetes.io/component: runs
run_k8s_config:
  container_config:
    env: {{- include "ft.env" . | nindent 6 }}
    envFrom: {{- include "ft.envFrom" (dict "root" . "more" true) | nindent 6 }}
    resources: {{- toYaml .Values.runs.resources | nindent 6 }}
    securityContext: {{- include "ft.containerSecurity" . | nindent 6 }}
    volumeMounts: {{- include "ft.volumeMounts" . | nindent 6 }}
  pod_spec_config:
    affinity: {{- include "ft.affinity" . | nindent 6 }}
    enableServiceLinks: false
    initContainers:
      - {{- include "ft.initContainer" (dict "root" . "image" (include "ft.image" .Values.images.trainer)) | nindent 8 }}
    securityContext: {{- include "ft.podSecurity" . | nindent 6 }}
    tolerations: # of a node that is gone: its runs are replaced after half a minute instead of five
      - {key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
      - {key: node.kubernetes.io/unreachable, operator: Exists, effect: NoExecute, tolerationSeconds: 30}
    volumes: {{- include "ft.volumes" . | nindent 6 }}
{{- end }}
