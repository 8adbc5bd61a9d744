{{- define "ft.name" -}}
{{- if contains "ft-platform" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-ft-platform" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "ft.selector" -}}
app.kubernetes.io/name: ft-platform
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "ft.labels" -}}
{{ include "ft.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* An image by its digest: (.Values.images.trainer) */}}
{{- define "ft.image" -}}
{{ .repository }}@{{ .digest }}
{{- end }}

{{- define "ft.apiUrl" -}}
http://{{ include "ft.name" . }}-api.{{ .Release.Namespace }}.svc:8000
{{- end }}

{{- define "ft.publicUrl" -}}
{{- if .Values.publicUrl }}{{ .Values.publicUrl }}
{{- else if and .Values.ingress.enabled .Values.ingress.apiHost }}{{ .Values.ingress.tlsSecret | empty | ternary "http" "https" }}://{{ .Values.ingress.apiHost }}
{{- else }}{{ include "ft.apiUrl" . }}
{{- end }}
{{- end }}

{{- define "ft.dagsterHost" -}}
{{ include "ft.name" . }}-dagster.{{ .Release.Namespace }}.svc:3000
{{- end }}

{{- /* Restricted pod security: fields of a pod's and of a container's security context. */}}
{{- define "ft.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "ft.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Nodes of the pools are for gangs, which count on their cores. */}}
{{- define "ft.affinity" -}}
nodeAffinity:
  requiredDuringSchedulingIgnoredDuringExecution:
    nodeSelectorTerms:
      - matchExpressions: [{key: ft-platform/pool, operator: DoesNotExist}]
{{- end }}

{{- define "ft.databaseEnv" -}}
- name: FT_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.database.secret }}, key: FT_DATABASE_URL}}
{{- end }}

{{- define "ft.dagsterDatabaseEnv" -}}
- name: FT_DAGSTER_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.database.secret }}, key: FT_DAGSTER_DATABASE_URL}}
{{- end }}

{{- /* Variables from Secrets that every process of the platform reads. */}}
{{- define "ft.env" -}}
{{ include "ft.databaseEnv" . }}
{{ include "ft.dagsterDatabaseEnv" . }}
- name: DAGSTER_POSTGRES_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.database.secret }}, key: FT_DAGSTER_DATABASE_URL}}
{{ include "ft.inferenceEnv" . }}
{{- if .Values.mlflow.secret }}
- name: FT_MLFLOW_URI
  valueFrom: {secretKeyRef: {name: {{ .Values.mlflow.secret }}, key: FT_MLFLOW_URI}}
{{- end }}
{{- end }}

{{- define "ft.inferenceEnv" -}}
{{- if or .Values.inference.urls .Values.modelServers }}
- name: FT_INFERENCE_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.inference.secret }}, key: token}}
{{- end }}
{{- end }}

{{- define "ft.dagsterTokenEnv" -}}
- name: FT_DAGSTER_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .Values.keys.secret }}, key: FT_DAGSTER_TOKEN}}
{{- end }}

{{- /* (dict "root" $ "more" true): `more` adds the operator's own Secrets. */}}
{{- define "ft.envFrom" -}}
- configMapRef: {name: {{ include "ft.name" .root }}-env}
{{- with .root.Values.objectStore.secret }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- if .more }}
{{- range .root.Values.envSecrets }}
- secretRef: {name: {{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{- /* A directory with mount points in it is a volume of its own: the container runtime creates mount points as root. */}}
{{- define "ft.volumeMounts" -}}
- {name: home, mountPath: /var/lib/ft}
- {name: work, mountPath: /var/lib/ft/work}
- {name: dagster, mountPath: /var/lib/dagster}
- {name: tmp, mountPath: /tmp}
- {name: files, mountPath: /etc/ft, readOnly: true}
- {name: files, mountPath: /var/lib/dagster/dagster.yaml, subPath: dagster.yaml, readOnly: true}
{{- if .Values.volumes.models }}
- {name: models, mountPath: /var/lib/ft/models}
{{- end }}
{{- if .Values.volumes.adapters }}
- {name: adapters, mountPath: /var/lib/ft/work/adapters}
{{- end }}
{{- end }}

{{- define "ft.volumes" -}}
- {name: home, emptyDir: {}}
- {name: work, emptyDir: {sizeLimit: {{ .Values.volumes.scratchSize }}}}
- {name: dagster, emptyDir: {}}
- {name: tmp, emptyDir: {sizeLimit: {{ .Values.volumes.scratchSize }}}}
- {name: files, configMap: {name: {{ include "ft.name" . }}-files}}
{{- with .Values.volumes.models }}
- {name: models, persistentVolumeClaim: {claimName: {{ . }}}}
{{- end }}
{{- with .Values.volumes.adapters }}
- {name: adapters, persistentVolumeClaim: {claimName: {{ . }}}}
{{- end }}
{{- end }}

{{- /* (dict "root" $ "image" "..." "keys" true "signing" true): copies the compiled kernels, and the key files with the mode that the platform requires. */}}
{{- define "ft.initContainer" -}}
name: prepare
image: {{ .image }}
command: [sh, -ec]
args: ['cp -r /opt/kernels /var/lib/ft/kernels{{ if .keys }}; install -m 600 /run/secrets/ft/secrets.key /run/ft/secrets.key{{ end }}{{ if .signing }}; install -m 600 /run/secrets/ft-signing/signing.key /run/ft/signing.key{{ end }}']
volumeMounts:
  - {name: home, mountPath: /var/lib/ft}
  {{- if .keys }}
  - {name: keys, mountPath: /run/secrets/ft, readOnly: true}
  - {name: key, mountPath: /run/ft}
  {{- end }}
  {{- if .signing }}
  - {name: signing, mountPath: /run/secrets/ft-signing, readOnly: true}
  {{- end }}
resources: {requests: {cpu: 50m, memory: 32Mi}, limits: {memory: 64Mi}}
securityContext: {{- include "ft.containerSecurity" .root | nindent 2 }}
{{- end }}

{{- /* (dict "root" $ "account" "..." "token" false "keys" false "image" "..."): what the specs of all pods begin with. */}}
{{- define "ft.podSpec" -}}
serviceAccountName: {{ .account }}
automountServiceAccountToken: {{ .token | default false }}
enableServiceLinks: false
securityContext: {{- include "ft.podSecurity" .root | nindent 2 }}
affinity: {{- include "ft.affinity" .root | nindent 2 }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets: {{- range . }}
  - {name: {{ . }}}
{{- end }}
{{- end }}
{{- end }}

{{- /* A job that runs once: (dict "root" $ "component" "..." "account" "..." "token" false "store" false "models" false "command" (list ...) "env" "..."). */}}
{{- define "ft.jobPod" -}}
metadata:
  labels: {{- include "ft.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
spec:
  {{- include "ft.podSpec" . | nindent 2 }}
  restartPolicy: Never
  containers:
    - name: {{ .component }}
      image: {{ include "ft.image" .root.Values.images.controlPlane }}
      command: {{- toYaml .command | nindent 8 }}
      env: {{- .env | nindent 8 }}
      {{- if not .alone }}
      envFrom:
        - configMapRef: {name: {{ include "ft.name" .root }}-env}
        {{- if and .store .root.Values.objectStore.secret }}
        - secretRef: {name: {{ .root.Values.objectStore.secret }}}
        {{- end }}
      {{- end }}
      resources: {{- toYaml .root.Values.jobs.resources | nindent 8 }}
      securityContext: {{- include "ft.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        - {name: home, mountPath: /var/lib/ft}
        - {name: tmp, mountPath: /tmp}
        {{- if not .alone }}
        - {name: files, mountPath: /etc/ft, readOnly: true}
        {{- end }}
        {{- if and .models .root.Values.volumes.models }}
        - {name: models, mountPath: /var/lib/ft/models, readOnly: true}
        {{- end }}
  volumes:
    - {name: home, emptyDir: {}}
    - {name: tmp, emptyDir: {}}
    {{- if not .alone }}
    - {name: files, configMap: {name: {{ include "ft.name" .root }}-files}}
    {{- end }}
    {{- if and .models .root.Values.volumes.models }}
    - {name: models, persistentVolumeClaim: {claimName: {{ .root.Values.volumes.models }}, readOnly: true}}
    {{- end }}
{{- end }}
