-- beat: incarnation of an api. Like ``renew`` it does not raise the commit counter. An api without jobs that end with it is not listed.
if redis.call('HGET', KEY.apis, ARGV[3]) then api_beat(ARGV[3]) end
return answer('OK')
